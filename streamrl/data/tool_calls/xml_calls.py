"""Calls that are written as XML: `<function=NAME><parameter=KEY>VALUE</parameter></function>`, of Qwen3-Coder and Qwen3.5.

A value is a text; what it stands for is said by the tool's JSON schema. Time is linear in the text, as in `json_calls`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from streamrl.data.tool_calls.json_calls import Broken, Places, decoded
from streamrl.data.tool_calls.turns import Piece, ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""By tool and parameter: its JSON schema."""
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END = "<function=", "</function>"
_PARAMETER, _VALUE_END = "<parameter=", "</parameter>"
_NAME = re.compile(r"[^<>\n]{1,256}>")
_BLANK = re.compile(r"\s*")
_WORDS = {"true": True, "false": False}


def functions(text: str, schemas: Schemas) -> Iterator[Piece]:
    """The calls of a text, in `<tool_call>` tags or, as models write them too, without."""
    starts = [found.start() for found in re.finditer(f"{_OPEN}|{_FUNCTION}", text)]
    marks = {mark: Places(text, mark) for mark in (_CLOSE, _END, _VALUE_END)}
    place = 0
    for start in starts:
        if start < place:  # within the call before
            continue
        yield Piece(text[place:start])
        inside = _skip(text, start + len(_OPEN)) if text.startswith(_OPEN, start) else start
        try:
            call, place = _call(text, inside, marks[_VALUE_END], schemas)
        except Broken as error:
            place = _after(text, marks, start)
            yield Piece(text[start:place], problem=str(error))
            continue
        closed = _skip(text, place)
        if text.startswith(_CLOSE, closed):
            place = closed + len(_CLOSE)
        yield Piece(text[start:place], (call,))
    yield Piece(text[place:])


def _call(text: str, place: int, values: Places, schemas: Schemas) -> tuple[ToolCall, int]:
    """The call that begins at `place`, and where it ends."""
    if not text.startswith(_FUNCTION, place):
        raise Broken(f"expected {_FUNCTION}NAME> after {_OPEN}")
    name, place = _name(text, place + len(_FUNCTION), _FUNCTION)
    known = schemas.get(name, {})
    arguments: dict[str, Any] = {}
    while not text.startswith(_END, place := _skip(text, place)):
        if not text.startswith(_PARAMETER, place):
            # As above: a model may stop before the closing tags.
            if place == len(text):
                return ToolCall(name, arguments), place
            raise Broken(f"expected {_PARAMETER}KEY> or {_END} in the call of {name}")
        key, place = _name(text, place + len(_PARAMETER), _PARAMETER)
        end = values.first(place)
        if end is None:
            raise Broken(f"the parameter {key} of {name} has no {_VALUE_END}")
        arguments[key] = typed(text[place:end].removeprefix("\n").removesuffix("\n"), known.get(key))
        place = end + len(_VALUE_END)
    return ToolCall(name, arguments), place + len(_END)


def _name(text: str, place: int, after: str) -> tuple[str, int]:
    found = _NAME.match(text, place)
    if found is None:
        raise Broken(f"expected a name and > after {after}")
    return found[0][:-1].strip(), found.end()


def _skip(text: str, place: int) -> int:
    found = _BLANK.match(text, place)
    return place if found is None else found.end()


def _after(text: str, marks: Mapping[str, Places], start: int) -> int:
    for mark in (_CLOSE, _END):
        end = marks[mark].first(start)
        if end is not None:
            return end + len(mark)
    return len(text)


def schemas_of(tools: Any) -> Schemas:
    """The parameters of tools by name, in OpenAI's form or bare; what has another form is passed over: templates take any."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools if isinstance(tools, list | tuple) else ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        parameters = function.get("parameters") if isinstance(function, Mapping) else None
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(function, Mapping) and isinstance(properties, Mapping):
            found[str(function.get("name"))] = properties
    return found


def typed(text: str, schema: Any) -> Any:
    """A parameter's value by its schema. A text that does not fit, or whose parameter has no schema, stays a text: the tool judges it."""
    types = _types(schema)
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    if "boolean" in types and text.strip().lower() in _WORDS:
        return _WORDS[text.strip().lower()]
    try:
        value = decoded(text)
    except Broken:
        return text
    fits = {
        "integer": isinstance(value, int) and not isinstance(value, bool),
        "number": isinstance(value, int | float) and not isinstance(value, bool),
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
    }
    return value if any(fits.get(name, False) for name in types) else text


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    found: set[str] = set()
    for each in [schema, *(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        said = each.get("type") if isinstance(each, Mapping) else None
        found |= {said} if isinstance(said, str) else {name for name in said if isinstance(name, str)} if isinstance(said, list) else set()
    return found
