"""Calls that are written as JSON: Hermes and Qwen3 between tags, Llama 3 bare, DeepSeek between special tokens.

What these functions read was written by a model, so by anyone: they take time linear in the text, and raise nothing but `Broken`.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl.data.tool_calls.turns import Piece, ToolCall

MAX_DEPTH = 64
"""Of lists and tables in a call's arguments, so that whatever is done with them later does not run out of stack."""
_CLOSINGS = 4
"""A tag that closes a call may stand in a text within its JSON: so many of them are tried as its end."""
_PROBLEM_CHARS = 200


class Broken(Exception):
    """What is wrong with a call."""


class Places:
    """Where a mark stands in a text. All are looked up once, so that a text full of marks without an end is read once too."""

    def __init__(self, text: str, mark: str) -> None:
        self.mark = mark
        self._starts = [found.start() for found in re.finditer(re.escape(mark), text)]

    def from_(self, place: int) -> Iterator[int]:
        """The first few at or after `place`, in order."""
        number = bisect_left(self._starts, place)
        return iter(self._starts[number : number + _CLOSINGS])

    def first(self, place: int) -> int | None:
        """The first at or after `place`."""
        return next(self.from_(place), None)


def tagged(text: str) -> Iterator[Piece]:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes 2 Pro, Qwen2.5, Qwen3."""
    opened, closed = Places(text, "<tool_call>"), Places(text, "</tool_call>")
    place = 0
    while (start := opened.first(place)) is not None:
        yield Piece(text[place:start])
        inside = start + len(opened.mark)
        ends = list(closed.from_(inside))
        why = ""
        # Without a closing tag the text's end is one: a model may stop before it.
        for end in ends or [len(text)]:
            try:
                calls = calls_in(decoded(text[inside:end]))
            except Broken as error:
                why = why or str(error)
            else:
                place = min(end + len(closed.mark), len(text))
                yield Piece(text[start:place], calls)
                break
        else:
            place = ends[0] + len(closed.mark) if ends else len(text)
            yield Piece(text[start:place], problem=why if ends else f"it has no {closed.mark}, and {why}")
    yield Piece(text[place:])


_BARE = re.compile(r'\[?\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"[^"]*"\s*,\s*"(?:parameters|arguments)"')
_BLANK = re.compile(r"[\s;]*")
_TAG = "<|python_tag|>"


def bare(text: str) -> Iterator[Piece]:
    """`{"name": ..., "parameters": {...}}`, with `<|python_tag|>` before it or none, several with `;` between them: Llama 3.

    Without the tag only a text that begins so is a call: a model may answer in JSON.
    """
    before, tag, rest = text.partition(_TAG)
    if not tag:
        before, rest = "", text
        if not rest.lstrip().startswith(("{", "[")):
            yield Piece(text)
            return
    yield Piece(before)
    decoder = json.JSONDecoder()
    place, start = 0, _end_of(_BLANK, rest, 0)
    if start == len(rest):
        yield Piece(tag + rest, problem=f"expected JSON after {_TAG}" if tag else "")
    while start < len(rest):
        # What follows a call may be content, as may a text that only looks like JSON.
        is_call = bool(tag and not place) or _BARE.match(rest, start) is not None
        calls: tuple[ToolCall, ...] = ()
        end, problem = start, ""
        try:
            _, end = decoder.raw_decode(rest, start)
            calls = calls_in(decoded(rest[start:end])) if is_call else ()
        except (Broken, ValueError, RecursionError) as error:
            problem = _said(error)
        if not calls:
            yield Piece(("" if place else tag) + rest[place:], problem=problem if is_call else "")
            return
        yield Piece(rest[place:end], calls)
        place, start = end, _end_of(_BLANK, rest, end)


_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_ALL_BEGIN, _ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"


def deepseek(text: str) -> Iterator[Piece]:
    """DeepSeek's special tokens around `function<sep>NAME` and fenced JSON (V3, R1), or around `NAME<sep>JSON` (V3.1)."""
    opened, closed, all_closed = (Places(text, mark) for mark in (_BEGIN, _END, _ALL_END))
    place = 0
    while (start := opened.first(place)) is not None:
        before = text[place:start].rstrip()
        yield Piece(before.removesuffix(_ALL_BEGIN) if before.endswith(_ALL_BEGIN) else text[place:start])
        end = closed.first(start)
        if end is None:  # as above
            end = all_closed.first(start)
        inside, place = text[start + len(_BEGIN) : end], len(text) if end is None else end
        place += len(_END) if text.startswith(_END, place) else 0
        try:
            yield Piece(text[start:place], (_deepseek_call(inside),))
        except Broken as error:
            yield Piece(text[start:place], problem=str(error))
        after = _end_of(_BLANK, text, place)
        if text.startswith(_ALL_END, after):
            place = after + len(_ALL_END)
    yield Piece(text[place:])


def _deepseek_call(inside: str) -> ToolCall:
    kind, found, rest = inside.partition(_SEP)
    if not found:
        raise Broken(f"expected {_SEP} between a call's name and its arguments")
    name, fenced, arguments = rest.partition("\n```json\n")
    if not fenced:
        return call_of({"name": kind.strip(), "arguments": decoded(rest)})
    arguments = arguments.rstrip()
    return call_of({"name": name.strip(), "arguments": decoded(arguments.removesuffix("```"))})


def _end_of(pattern: re.Pattern[str], text: str, place: int) -> int:
    found = pattern.match(text, place)
    return place if found is None else found.end()


def decoded(text: str) -> Any:
    """A value of JSON; raises Broken for what is none, too deep, or cannot be written again."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise Broken(f"expected JSON at most {MAX_DEPTH} levels deep") from None
    except ValueError as error:  # msgspec's errors, and those of texts that are no UTF-8
        raise Broken(f"expected JSON, got: {_said(error)}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return value
    raise Broken(f"expected JSON at most {MAX_DEPTH} levels deep")


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def calls_in(value: Any) -> tuple[ToolCall, ...]:
    """One call, or a list of them; raises Broken."""
    return tuple(map(call_of, value)) if isinstance(value, list) and value else (call_of(value),)


def call_of(value: Any) -> ToolCall:
    """`{"name": ..., "arguments": {...}}`, or `parameters`, which may be a text of JSON, or none; raises Broken."""
    if not isinstance(value, dict):
        raise Broken(f"expected a table with name and arguments, got {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise Broken("expected the name of a tool under `name`")
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        arguments = decoded(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise Broken(f"expected a table of arguments for {name[:_PROBLEM_CHARS]!r}, got {type(arguments).__name__}")
    return ToolCall(name, arguments)


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return f"expected JSON at most {MAX_DEPTH} levels deep"
    return str(error)[:_PROBLEM_CHARS]
