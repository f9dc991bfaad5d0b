"""Replies in the shapes of the families and of other templates: what is appended, and that nothing that was sampled changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.chat_format import ChatFormat
from tests.support.chat_templates import CLOSING, TEMPLATES, family, tokenizer_for
from tests.support.conversations import Round, contents, played, rounds, tools_for
from tests.support.errors import raises
from tests.support.policies import make_model

# As Qwen3's template does: an assistant's turn after the last question is shown with its (empty) thoughts, an earlier one without, and a
# newline follows every message.
THINKING = """\
{%- set last = namespace(user=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set last.user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
{{- '<|' + message.role + '|>' }}
{%- if message.role == 'assistant' and loop.index0 > last.user %}{{- '[]' }}{%- endif %}
{{- message.content + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def tokenizer_with(directory: Path, template: str | None = None) -> Tokenizer:
    make_model(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return load_tokenizer(directory)


@pytest.mark.parametrize("role", ["tool", "user"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_in_a_template_with_thoughts(tmp_path: Path, role: str, ended: bool) -> None:
    tokenizer = tokenizer_with(tmp_path / "model", THINKING)
    last = tokenizer.encode("<|end|>" if ended else "7")[0]
    reply = ChatFormat(tokenizer, chat_template=True).reply(role, "five", last_token=last)
    assert tokenizer.decode(reply) == ("" if ended else "<|end|>") + f"\n<|{role}|>five<|end|>\n<|assistant|>"


def test_contents_may_look_like_anything_and_unknown_roles_are_refused(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "model")
    reply = ChatFormat(tokenizer, chat_template=True).reply("tool", "0123456789 0123456789", last_token=5)
    assert tokenizer.decode(reply) == "<|tool|>0123456789 0123456789<|end|><|assistant|>"
    with pytest.raises(ConfigError, match="unknown role judge"):
        ChatFormat(tokenizer_with(tmp_path / "model"), chat_template=True).reply("judge", "five", last_token=5)


CLOSING_BY_VARIABLE = """\
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}
{{- '<|end|>' + ('!' if loud else '.') + (tools | length | string if tools else '') }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def test_what_closes_a_turn_is_rendered_once_for_each_set_of_variables_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_with(tmp_path / "model", CLOSING_BY_VARIABLE)
    format, rendered, render = ChatFormat(tokenizer, chat_template=True), 0, tokenizer.apply_chat_template

    def counted(*args: Any, **options: Any) -> str:
        nonlocal rendered
        rendered += 1
        return render(*args, **options)

    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)
    for loud, tools in ((False, None), (True, None), (True, [{}, {}])) * 2:
        for number in range(3):
            before = rendered
            given: dict[str, Any] = {"tools": tools, "template_kwargs": {"loud": loud}}
            reply = format.replies([{"role": "user", "content": "five"}], last_token=tokenizer.encode("7")[0], **given)
            mark = ("!" if loud else ".") + ("2" if tools else "")
            assert tokenizer.decode(reply) == f"<|end|>{mark}<|user|>five<|end|>{mark}<|assistant|>"
            assert rendered - before == 1 or (number == 0 and rendered - before <= 3)
    assert rendered == 18 + 2 * 3, "for each of three the closing, and whether the template shows the message"


FAMILIES = tuple(TEMPLATES)


@pytest.mark.parametrize("name", FAMILIES)
def test_appended_tokens_say_what_the_template_says_of_the_whole(name: str) -> None:
    tokenizer = family(name)

    @settings(max_examples=30, deadline=None)
    @given(contents, contents, rounds(name))
    def check(system: str, question: str, made: list[Round]) -> None:
        opening = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        tokens, messages, turns = played(name, tokenizer, opening, made)
        assert tokenizer.decode(tokens) == tokenizer.unveiled(tokenizer.apply_chat_template(messages, tools=tools_for(tokenizer)))
        for place, ids in turns:
            assert tokens[place : place + len(ids)] == ids

    check()


def closes(tokenizer: Tokenizer, name: str) -> int:
    return tokenizer.encode(CLOSING[name])[0]


@pytest.mark.parametrize(
    ("name", "thinking", "ending"),
    [
        ("qwen3", True, "<|im_start|>assistant\n"),
        ("qwen3", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
        ("qwen3.5", True, "<|im_start|>assistant\n<think>\n"),
        ("qwen3.5", False, "<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    ],
)
def test_thinking_is_switched_by_turn(name: str, thinking: bool, ending: str) -> None:
    tokenizer = family(name)
    chat = ChatFormat(tokenizer, chat_template=True)
    given = {"enable_thinking": thinking}
    prompt = chat.prompt([{"role": "user", "content": "2+3"}], template_kwargs=given)
    reply = chat.replies([{"role": "user", "content": "and 4?"}], last_token=closes(tokenizer, name), template_kwargs=given)
    assert tokenizer.decode(prompt).endswith(ending)
    assert tokenizer.decode(reply) == "\n<|im_start|>user\nand 4?<|im_end|>\n" + ending
    assert chat.opens_thought(reply) == ending.endswith("<think>\n")


@pytest.mark.parametrize(("last", "closing"), [("<|eot_id|>", ""), ("<|eom_id|>", ""), ("5", "<|eot_id|>")])
def test_a_turn_that_any_stop_token_has_ended_is_not_closed_again(last: str, closing: str) -> None:
    tokenizer = family("llama3")
    reply = ChatFormat(tokenizer, chat_template=True).replies([{"role": "user", "content": "5"}], last_token=tokenizer.encode(last)[-1])
    assert tokenizer.decode(reply).startswith(closing + "<|start_header_id|>user")


@pytest.mark.parametrize("name", ["qwen3.5", "deepseek"])
def test_a_system_message_that_the_template_puts_elsewhere_is_refused(name: str) -> None:
    tokenizer = family(name)
    with pytest.raises((SchemaError, ConfigError), match=r"be the first|told apart"):
        ChatFormat(tokenizer, chat_template=True).replies([{"role": "system", "content": "x"}], last_token=0)


NEEDS_CALLS = """\
{%- for m in messages %}
{%- if m.role == 'tool' and not messages[loop.index0 - 1].tool_calls %}{{- raise_exception('no call') }}{%- endif %}
{{- '<|im_start|>' + m.role + ' ' + (m.name or '') + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- call.function.name + call.function.arguments }}{%- endfor %}{{- '<|im_end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant \\n' }}{%- endif %}
"""


def test_what_is_appended_by_hand() -> None:
    tokenizer = tokenizer_for(NEEDS_CALLS, "<|im_end|>")
    message = {"role": "tool", "content": "5", "name": "look", "tool_call_id": "a"}
    reply = ChatFormat(tokenizer, chat_template=True).replies([message], last_token=closes(tokenizer, "qwen3"))
    assert tokenizer.decode(reply) == "<|im_start|>tool look\n5<|im_end|><|im_start|>assistant \n"
    tools = [{"name": "0123456789", "description": "9876543210"}]
    tokenizer = family("qwen3")
    reply = ChatFormat(tokenizer, chat_template=True).replies([{"role": "tool", "content": "5"}], last_token=0, tools=tools)
    assert tokenizer.decode(reply).count("5") == 1


@pytest.mark.parametrize("message", ["x", {}, {"role": "tool"}, {"role": "tool", "content": 5}, {"role": "assistant", "content": "5"}])
def test_messages_of_another_form_are_refused(message: Any) -> None:
    with pytest.raises(SchemaError):
        ChatFormat(family("qwen3"), chat_template=True).replies([message], last_token=0)


def test_a_variable_that_no_template_reads_is_refused() -> None:
    tokenizer = family("qwen3")
    for wrong in ({"enable_thinkng": False}, {"messages": []}, {"bos_token": "x"}):
        with raises(ConfigError, key="data.chat_template_kwargs", got=list(wrong)) as caught:
            ChatFormat(tokenizer, chat_template=True).prompt([{"role": "user", "content": "5"}], template_kwargs=wrong)
        assert "enable_thinking" in str(caught.value)
    with raises(ConfigError, key="data.chat_template_kwargs"):
        family("deepseek").check_template_kwargs({"thinking": True})
    family("llama3").check_template_kwargs({"date_string": "1 Jan 2026"})
