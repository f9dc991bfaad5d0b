import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.data.tool_calls import MAX_CALLS, ParsedTurn, ToolCall, ToolCallFormat, tool_call_format
from streamrl.errors import ConfigError
from tests.support.errors import raises

FORMS = ("hermes", "qwen3_coder", "llama3", "deepseek")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "properties": {
                    "n": {"type": "integer"},
                    "x": {"type": ["number", "null"]},
                    "on": {"type": "boolean"},
                    "at": {"anyOf": [{"type": "array"}, {"type": "object"}]},
                    "what": {"type": "string"},
                }
            },
        },
    }
]


class Template(msgspec.Struct):
    chat_template: str


def form(name: str = "auto", template: str = "") -> ToolCallFormat:
    return tool_call_format(Template(template), name)


def written(name: str, call: ToolCall) -> str:
    """A call as a model of the family writes it."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    if name == "hermes":
        return f'<tool_call>\n{{"name": {json.dumps(call.name)}, "arguments": {arguments}}}\n</tool_call>'
    if name == "llama3":
        return f'{{"name": {json.dumps(call.name)}, "parameters": {arguments}}}'
    if name == "deepseek":
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call.name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in call.arguments.items()}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call.name}>\n{inside}</function>\n</tool_call>"


def turn_of(name: str, content: str, calls: list[ToolCall]) -> str:
    texts = [written(name, call) for call in calls]
    if name == "llama3":
        return content + ("<|python_tag|>" if content else "") + "; ".join(texts)
    if name == "deepseek":
        return f"{content}<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"
    return "\n".join([content, *texts] if content else texts)


LOOK = ToolCall("look", {"n": 5, "x": None, "on": True, "at": [1, {"a": "b"}], "what": "a\nb"})
THEN = ToolCall("then", {})


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("thinking", [None, True, False])
def test_a_turn_with_thought_content_and_two_calls(name: str, thinking: bool | None) -> None:
    text = turn_of(name, "Let me see.", [LOOK, THEN])
    thought = {None: "<think>\nwell, well\n</think>\n\n", True: "well, well\n</think>\n\n", False: ""}[thinking]
    told = ParsedTurn(content="Let me see.", reasoning="well, well" if thought else "", tool_calls=(LOOK, THEN))
    assert form(name).parse(thought + text, TOOLS, thinking=thinking) == told


@pytest.mark.parametrize("name", FORMS)
def test_a_text_without_calls_is_content_as_it_is(name: str) -> None:
    for text in ("", "  a\n", '{"answer": 5}', '{"name": "Bob", "age": 5}', "[1, 2]", "{a", "</tool_call> </function>"):
        assert form(name).parse(text) == ParsedTurn(content=text)


def test_calls_that_are_written_oddly_are_read() -> None:
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert form("deepseek").parse(text).tool_calls == (ToolCall("look", {}),)
    call = ToolCall("write", {"text": "</tool_call><tool_call></tool_call>"})
    assert form("hermes").parse(written("hermes", call)).tool_calls == (call,)
    [call] = (
        form("qwen3_coder")
        .parse(written("qwen3_coder", ToolCall("look", {"n": "five", "other": "5", "what": "5", "on": "False"})), TOOLS)
        .tool_calls
    )
    assert call.arguments == {"n": "five", "other": "5", "what": "5", "on": False}
    assert form("hermes").parse('<tool_call>{"name": "then"}').tool_calls == (THEN,)
    assert form("qwen3_coder").parse("<function=then>\n").tool_calls == (THEN,)
    assert form("deepseek").parse("<｜tool▁call▁begin｜>then<｜tool▁sep｜>{}").tool_calls == (THEN,)
    turn = form("hermes").parse("<think>I could " + written("hermes", THEN))
    assert (turn.content, turn.tool_calls) == ("", ())
    assert "within a thought" in turn.malformed[0].problem


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ', "no </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": 5}</tool_call>', "table of arguments"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', "name of a tool"),
        ("hermes", "<tool_call>" + "[" * 100_000 + "</tool_call>", "levels deep"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": ' + "[" * 100 + "]" * 100 + "}}</tool_call>", "levels deep"),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "invalid"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=x>\n5", "has no </parameter>"),
        ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "<function="),
        ("llama3", '<|python_tag|>print("five")', "Expecting value"),
        ("llama3", '{"name": "f", "parameters": {"x": ', "Expecting value"),
        ("deepseek", "<｜tool▁call▁begin｜>f<｜tool▁call▁end｜>", "between a call's name"),
        ("deepseek", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\n```", "expected JSON"),
    ],
)
def test_a_broken_call_is_told_and_stays_in_the_content(name: str, text: str, problem: str) -> None:
    turn = form(name).parse(text)
    assert not turn.tool_calls and turn.content == text.strip() and problem in turn.malformed[0].problem


@pytest.mark.parametrize("name", FORMS)
def test_more_calls_than_a_turn_may_have_are_told(name: str) -> None:
    turn = form(name).parse(turn_of(name, "", [THEN] * (2 * MAX_CALLS)))
    assert len(turn.tool_calls) + len(turn.malformed) == MAX_CALLS
    assert "at most" in turn.malformed[-1].problem and turn.content.count("then") > MAX_CALLS


@pytest.mark.parametrize("name", FORMS)
def test_long_texts_written_by_an_enemy(name: str) -> None:
    """Each takes a blink in linear time; one that takes as long as its square would run into the suite's limit."""
    parts = [*MARKS, "\n", '"', "<tool_call>[", '<tool_call>{"a":"</tool_call>', "<tool_call>x</tool_call>", '{"a":']
    parts += ["<function=a><parameter=b></function></tool_call>", "<parameter=b></parameter>", '{"name":"f","parameters":{}};']
    parts += ["<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>"]
    for part in parts:
        for before in ("", "<|python_tag|>" if name == "llama3" else "<tool_call>"):
            text = before + part * ((1 << 18) // len(part))
            turn = form(name).parse(text)
            msgspec.json.encode(turn)


MARKS = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>", "</parameter>"),
    *("<|python_tag|>", "```json", ";", "{", "}", "[", "]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
]
marks = st.sampled_from([*MARKS, "\n", '"', '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": {}}'])


@settings(max_examples=300, deadline=None)
@given(st.lists(marks | st.text(max_size=5), max_size=20).map("".join), st.sampled_from(FORMS), st.sampled_from([None, True, False]))
def test_any_text_is_read(text: str, name: str, thinking: bool | None) -> None:
    turn = form(name).parse(text, TOOLS, thinking=thinking)
    for broken in turn.malformed:
        assert broken.text in text
        assert broken.text.strip() in turn.content + turn.reasoning
    if turn == ParsedTurn(content=turn.content):
        assert turn.content.strip() == text.strip() or "think>" in text


texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,15}", fullmatch=True)
calls = st.builds(ToolCall, names, st.dictionaries(texts, values, max_size=4))


@pytest.mark.parametrize("name", ["hermes", "llama3", "deepseek"])
@settings(max_examples=40, deadline=None)
@given(st.lists(calls, min_size=1, max_size=4))
def test_what_was_written_is_read_again(name: str, wanted: list[ToolCall]) -> None:
    turn = form(name).parse(turn_of(name, "", wanted))
    assert (turn.tool_calls, turn.malformed, turn.content) == (tuple(wanted), (), "")


plain = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)


@pytest.mark.parametrize("tools", [None, 5, "x", [5], [{"function": 5}], {"a": 1}, [{"name": "look", "parameters": {"properties": 5}}]])
def test_tools_of_any_form_are_taken(tools: Any) -> None:
    assert form("qwen3_coder").parse(written("qwen3_coder", THEN), tools).tool_calls == (THEN,)


def test_the_form_is_read_from_the_template() -> None:
    for template, name in (
        ("{{'<tool_call>' + '{\"name\": ' + '\"arguments\": '}}", "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=x>", "qwen3_coder"),
        ('<|start_header_id|> {"name": x, "parameters": y}', "llama3"),
        ("<｜tool▁call▁begin｜>", "deepseek"),
        ("<tool_call>{{ name }}<arg_key>", "none"),
        ("{{ messages }}", "none"),
    ):
        assert form(template=template).name == name


def test_a_form_that_is_not_known_is_refused() -> None:
    with raises(ConfigError, key="data.tool_calls", got="gpt") as caught:
        form("gpt")
    assert "hermes" in str(caught.value)
