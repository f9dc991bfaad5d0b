from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError
from streamrl.producers.chat_format import ChatFormat
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


def test_a_role_the_template_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown role judge"):
        ChatFormat(tokenizer_with(tmp_path / "model"), chat_template=True).reply("judge", "five", last_token=5)


def test_contents_may_look_like_anything(tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path / "model")
    reply = ChatFormat(tokenizer, chat_template=True).reply("tool", "0123456789 0123456789", last_token=5)
    assert tokenizer.decode(reply) == "<|tool|>0123456789 0123456789<|end|><|assistant|>"


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
