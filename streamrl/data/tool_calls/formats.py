"""The forms in which models call tools, chosen by a tokenizer's chat template or by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from streamrl.data.tool_calls import json_calls, xml_calls
from streamrl.data.tool_calls.turns import Malformed, ParsedTurn, Piece, ToolCall
from streamrl.errors import ConfigError

MAX_CALLS = 256
"""Of one turn, broken ones included; what follows is content."""
_THINK, _THOUGHT = "<think>", "</think>"


class HasTemplate(Protocol):
    """The part of a tokenizer that is looked at."""

    @property
    def chat_template(self) -> str:
        """Its source (Jinja), or empty."""
        ...


class ToolCallFormat(msgspec.Struct, frozen=True):
    """How one family of models writes calls."""

    name: str
    marks: tuple[str, ...]
    """Texts that begin a call."""
    scan: Callable[[str, Any], Iterator[Piece]]
    """The pieces of a text after its thought, in order, given the tools."""
    in_template: tuple[str, ...] = ()
    """All of them stand in the chat templates of the family."""

    def parse(self, text: str, tools: Any = None, *, thinking: bool | None = None) -> ParsedTurn:
        """What a turn says. Takes any text, in time linear in its length, and raises nothing.

        Args:
            text: of the turn, special tokens written out, its stop token left out.
            tools: definitions in OpenAI's form, for the types of values that are written as texts (Qwen3-Coder).
            thinking: whether the prompt has opened the thought, so that the text begins within it; None: not known, and a `</think>`
                before any call ends one.
        """
        calls: list[ToolCall] = []
        malformed: list[Malformed] = []
        content: list[str] = []
        reasoning, rest, ended = self._without_thought(text, thinking)
        if not ended and (place := self._first_mark(reasoning)) >= 0:
            malformed.append(Malformed(reasoning[place:], f"it stands within a thought that has no {_THOUGHT}"))
        full = False
        for piece in self.scan(rest, tools):
            if full or not (piece.calls or piece.problem):
                content.append(piece.text)
            elif len(calls) + len(malformed) + len(piece.calls) >= MAX_CALLS:
                full = True
                malformed.append(Malformed(piece.text, f"expected at most {MAX_CALLS} calls in a turn, got more"))
                content.append(piece.text)
            elif piece.problem:
                malformed.append(Malformed(piece.text, piece.problem))
                content.append(piece.text)
            else:
                calls += piece.calls
        said = "".join(content)
        if calls or malformed:
            said = "\n".join(kept for part in content if (kept := part.strip()))
        return ParsedTurn(content=said, reasoning=reasoning, tool_calls=tuple(calls), malformed=tuple(malformed))

    def _without_thought(self, text: str, thinking: bool | None) -> tuple[str, str, bool]:
        """(thought, what follows it, whether it has ended)."""
        body = text.lstrip()
        if body.startswith(_THINK):
            thinking, body = True, body[len(_THINK) :]
        end = body.find(_THOUGHT)
        if thinking is None and end >= 0:
            place = self._first_mark(text)
            thinking = not 0 <= place < len(text) - len(body) + end
        if not thinking:
            return "", text, True
        if end < 0:
            return body.strip(), "", False
        return body[:end].strip(), body[end + len(_THOUGHT) :].lstrip("\n"), True

    def _first_mark(self, text: str) -> int:
        return min((place for mark in self.marks if (place := text.find(mark)) >= 0), default=-1)


def _content(text: str, tools: Any) -> Iterator[Piece]:
    yield Piece(text)


NONE = ToolCallFormat("none", (), _content)
"""Of models without tools: everything after the thought is content."""
_KNOWN = (
    ToolCallFormat(
        "qwen3_coder",
        ("<tool_call>", "<function="),
        lambda text, tools: xml_calls.functions(text, xml_calls.schemas_of(tools)),
        ("<function=", "<parameter="),
    ),
    ToolCallFormat("hermes", ("<tool_call>",), lambda text, tools: json_calls.tagged(text), ("<tool_call>", '"arguments')),
    ToolCallFormat("deepseek", ("<｜tool▁call▁begin｜>",), lambda text, tools: json_calls.deepseek(text), ("<｜tool▁call▁begin｜>",)),
    ToolCallFormat(
        "llama3", ("<|python_tag|>",), lambda text, tools: json_calls.bare(text), ("<|start_header_id|>", '"name"', '"parameters"')
    ),
)
"""In the order in which a template is asked: Qwen3.5's has the tag of Hermes too."""
AUTO = "auto"


def tool_call_format(tokenizer: HasTemplate, name: str = AUTO) -> ToolCallFormat:
    """The form in which a model calls tools.

    Args:
        tokenizer: of the model.
        name: `auto` chooses by the chat template, and `NONE` where that shows none; or one by its name.

    Raises:
        ConfigError: no such form.
    """
    formats = {each.name: each for each in (*_KNOWN, NONE)}
    if name == AUTO:
        template = tokenizer.chat_template
        return next((each for each in _KNOWN if all(mark in template for mark in each.in_template)), NONE)
    if name not in formats:
        known = ", ".join((AUTO, *formats))
        raise ConfigError(
            f"expected a form of tool calls, one of {known}; got {name!r}",
            hint="auto reads it from the chat template",
            key="data.tool_calls",
            got=name,
        )
    return formats[name]
