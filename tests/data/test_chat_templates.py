"""Conversations are rendered as `AutoTokenizer` renders them, by every chat template that trl ships, whatever form they came in."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.data.characters import write_tokenizer
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError, SchemaError
from tests.support.chat_templates import BOS, CLOSING, SPECIALS, family, tokenizer_for
from tests.support.errors import raises
from tests.support.needs import chat_templates

FOLDER = chat_templates()
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja")) if FOLDER is not None else []
LEAST = 60
"""Templates that trl 1.16 ships, and a few less: with fewer this compares nothing worth the name."""
END = "<|im_end|>"
LOOK = {
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
WAIT = {"name": "wait", "parameters": {"type": "object", "properties": {"seconds": {"type": "number"}}}}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": WAIT}]
AS_ARROW = [
    {
        "type": "function",
        "function": {**LOOK, "parameters": {**LOOK["parameters"], "properties": {"at": {"type": "string"}, "seconds": None}}},
    },
    {"type": "function", "function": {**WAIT, "description": None, "parameters": {**WAIT["parameters"], "required": None}}},
]
texts = st.text("ab 1\n.é{", max_size=8).map(lambda text: f"x{text}x")


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A question after a system message or none, answers, calls with their results; contents are texts."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(texts)})
    for _ in range(draw(st.integers(0, 2))):
        if draw(st.booleans()):
            call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": draw(texts)}}}
            messages.append({"role": "assistant", "content": draw(texts), "tool_calls": [call]})
            messages.append({"role": "tool", "name": "look", "tool_call_id": "call00001", "content": draw(texts)})
        messages.append({"role": "assistant", "content": draw(texts)})
        messages.append({"role": "user", "content": draw(texts)})
    return messages


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]


def with_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with the arguments of calls as JSON text."""

    def written(call: dict[str, Any]) -> dict[str, Any]:
        return {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False)}}

    return [{**m, "tool_calls": list(map(written, m["tool_calls"]))} if "tool_calls" in m else m for m in messages]


def as_arrow(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same as a table of Arrow has it: all messages have all fields."""
    names = dict.fromkeys(name for message in messages for name in message)
    return [{name: message.get(name) for name in names} for message in messages]


@cache
def template(name: str) -> str:
    assert FOLDER is not None
    return (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def reference(name: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    from tests.support.chat_templates import _backend  # pyright: ignore[reportPrivateUsage]

    return PreTrainedTokenizerFast(tokenizer_object=_backend(), bos_token=BOS, eos_token=END, chat_template=template(name))


def theirs(name: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str | None:
    """Render with transformers: with texts or with parts, whichever the template shows, and arguments in the form that it takes."""
    marked = reference(name).apply_chat_template([{"role": "user", "content": "4711"}], tokenize=False) if shows_texts(name) else ""
    given = messages if "4711" in marked else in_parts(messages)
    for form in (given, with_text(given)):
        try:
            return reference(name).apply_chat_template(form, tools=tools, tokenize=False, add_generation_prompt=prompt)
        except Exception:  # what a template raises is its own
            continue
    return None


@cache
def shows_texts(name: str) -> bool:
    try:
        return "4711" in reference(name).apply_chat_template([{"role": "user", "content": "4711"}], tokenize=False)
    except Exception:
        return False


@pytest.mark.needs("chat templates")
def test_there_are_templates_to_compare() -> None:
    assert len(NAMES) >= LEAST


@pytest.mark.needs("chat templates")
@pytest.mark.parametrize("name", NAMES)
def test_equal_to_transformers(name: str) -> None:
    tokenizer = tokenizer_for(template(name), END)
    forms = st.sampled_from([lambda messages: messages, in_parts, with_text, as_arrow, lambda messages: as_arrow(in_parts(messages))])

    @settings(max_examples=8, deadline=None)
    @given(
        conversations(),
        forms,
        st.sampled_from([None, TOOLS]),
        st.sampled_from([lambda t: t, lambda _: AS_ARROW, json.dumps]),
        st.booleans(),
    )
    def check(messages: list[dict[str, Any]], form: Any, tools: Any, tools_form: Any, prompt: bool) -> None:
        expected = theirs(name, messages, tools, prompt)
        given_tools = None if tools is None else tools_form(tools)
        if expected is None:
            with pytest.raises(ConfigError):
                tokenizer.apply_chat_template(form(messages), tools=given_tools, add_generation_prompt=prompt)
        elif tools is not None and expected == theirs(name, messages, None, prompt):
            with raises(ConfigError, missing=ANY):
                tokenizer.check_shown(form(messages), given_tools)
        else:
            text = tokenizer.apply_chat_template(form(messages), tools=given_tools, add_generation_prompt=prompt)
            assert text == expected
            assert tokenizer.encode(text) == reference(name)(text, add_special_tokens=False)["input_ids"]

    check()


@pytest.mark.needs("chat templates")
def test_a_call_without_a_content_is_shown_wherever_one_is() -> None:
    """Some templates tell it by a content that is none, some by one that is missing, and some add it to a text."""
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "q"}}}
    result = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "r"}
    num_shown = 0
    for name in NAMES:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
        spoken = [messages[0], {**messages[1], "content": "y"}, result]
        tokenizer, expected = tokenizer_for(template(name), END), theirs(name, spoken, None, False)
        if expected is not None and "look" in expected and shows_texts(name):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
            assert "look" in text and "None" not in text and "null" not in text, name
            num_shown += 1
            tokenizer.check_shown(messages)
    assert num_shown >= 40


def test_calls_and_tools_that_a_template_leaves_out_are_refused(tokenizer: Tokenizer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    called = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    with raises(ConfigError, missing="tool_calls"):
        tokenizer.check_shown(called)
    family("qwen3").check_shown(called, TOOLS)
    bare = tokenizer_for("{% for m in messages %}{{ m.content }}{% endfor %}", END)
    with raises(ConfigError, missing="tools"):
        bare.apply_chat_template(called[:1], tools=TOOLS)
    assert [bare.apply_chat_template(called[:1], tools=none) for none in (None, [], "", "[]", "null")] == ["x"] * 5
    only_with_system = tokenizer_for(
        "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %}{{ tools }}{% endif %}{% endfor %}", END
    )
    only_with_system.check_shown([{"role": "system", "content": "s"}, *called[:1]], TOOLS)
    with raises(ConfigError, missing="tools"):
        only_with_system.check_shown(called[:1], TOOLS)


NAMED = {"default": "default {{ messages[0].content }}", "tool_use": "tool_use {{ messages[0].content }}{{ tools | tojson }}", "rag": "rag"}


@pytest.mark.parametrize("layout", ["settings", "files", "files over settings"])
def test_the_template_is_chosen_by_name_as_transformers_chooses_it(tmp_path: Path, layout: str) -> None:
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    settings_file = tmp_path / "tokenizer_config.json"
    told = json.loads(settings_file.read_text())
    if layout != "files":
        named = NAMED if layout == "settings" else {"default": "old", "rag": "old"}
        told["chat_template"] = [{"name": name, "template": source} for name, source in named.items()]
        settings_file.write_text(json.dumps(told))
    if layout != "settings":
        (tmp_path / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            (tmp_path / "additional_chat_templates" / f"{name}.jinja").write_text(NAMED[name])
        (tmp_path / "chat_template.jinja").write_text(NAMED["default"])
    tokenizer, other, messages = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path), [{"role": "user", "content": "x"}]
    for tools, expected in ((None, "default x"), (TOOLS, "tool_use x" + json.dumps(TOOLS))):
        assert tokenizer.apply_chat_template(messages, tools=tools) == expected
        assert other.apply_chat_template(messages, tools=tools, tokenize=False) == expected


def test_named_templates_without_the_default_one_are_refused_where_that_is_meant(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(NAMED["tool_use"])
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tools=TOOLS).startswith("tool_use x")
    with raises(ConfigError, missing="chat_template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])


def test_an_end_token_may_be_named_only_in_the_map_of_special_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    told = json.loads((tmp_path / "tokenizer_config.json").read_text())
    end = told.pop("eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**told, "unk_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": end, "lstrip": False}, "pad_token": "<|end|>"}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.end_id, tokenizer.pad_id) == (5, 0), "tokenizer_config.json goes before it"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "x",
        ["x"],
        [{"content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
        [{"role": "user", "content": 42}],
        [{"role": "tool", "content": {"degrees": 3}}],
        [{"role": "user", "content": []}],
        [{"role": "tool", "content": ["one", "two"]}],
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        [{"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image"}]}],
    ],
)
def test_a_message_that_a_template_would_render_as_nothing_is_refused(messages: Any) -> None:
    with pytest.raises(SchemaError) as refusal:
        family("qwen3").apply_chat_template(messages)
    assert refusal.value.hint


@pytest.mark.parametrize("tools", ["look", "{", '{"name": "look"}', {"name": "look"}, [1], ["look"], 7])
def test_tools_of_another_form_are_refused(tools: Any) -> None:
    with pytest.raises(SchemaError):
        family("qwen3").apply_chat_template([{"role": "user", "content": "x"}], tools=tools)


CONTROL = [
    "<|im_end|>",
    "<|im_start|>",
    "<|endoftext|>",
    "<｜User｜>",
    "<｜end▁of▁sentence｜>",
    "\ufdd0",
    "\ue001",
    "<|im_",
    "end|>",
    "a",
    " ",
]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(CONTROL), max_size=6).map("".join),
    st.sampled_from(["user", "system", "tool"]),
    st.sampled_from(sorted(CLOSING)),
)
def test_what_others_write_gives_no_control_token(content: str, role: str, name: str) -> None:
    tokenizer = family(name)
    special = {tokenizer.encode(text)[0] for text in SPECIALS}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] if role != "system" else []
    plain, ids = (
        tokenizer.encode(
            tokenizer.apply_chat_template([*messages, {"role": role, "content": f"x{text}x"}, {"role": "user", "content": "z"}])
        )
        for text in ("", content)
    )
    assert [token for token in ids if token in special] == [token for token in plain if token in special]
    assert f"x{content}x" in tokenizer.decode(ids)
    assert [tokenizer.encode_many(["x", "x<|im_end|>"])[0], ids] == [tokenizer.encode("x"), ids]


def test_a_token_in_bars_is_a_control_token_though_its_vocabulary_does_not_say_so(tmp_path: Path) -> None:
    """As in the vocabularies of DeepSeek-R1's distillations."""
    write_tokenizer(tmp_path)
    told = json.loads((tmp_path / "tokenizer.json").read_text())
    told["added_tokens"] += [
        {"id": 103, "content": "<｜User｜>", "special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
        {"id": 104, "content": "<think>", "special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False},
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(told))
    tokenizer = load_tokenizer(tmp_path)
    ids = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "<｜User｜><think>"}]))
    assert (tokenizer.encode("<｜User｜>"), ids.count(103), ids.count(104)) == ([103], 0, 1)


def test_of_whole_conversations_the_models_own_control_tokens_are_tokens() -> None:
    tokenizer = family("llama3")
    messages = [{"role": "user", "content": "<|python_tag|>"}, {"role": "assistant", "content": "<|python_tag|>1"}]
    render = tokenizer.apply_chat_template
    counts = [tokenizer.encode(render(messages, own_turns=own)).count(tokenizer.encode("<|python_tag|>")[0]) for own in (False, True)]
    assert counts == [0, 1]
