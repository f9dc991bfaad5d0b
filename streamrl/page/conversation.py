"""A stored sample as a conversation: who wrote which of its tokens, turn by turn.

The record has tokens, the turns of the model and who sampled which token, and no messages. What the model has written is told by that
alone, whatever it wrote; the messages of what nobody sampled are told apart by how the tokenizer's chat template begins them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec

from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import ConfigError
from streamrl.schemas.samples import Sample, TurnSpan

ASSISTANT = "assistant"
PROMPT, ENVIRONMENT = "prompt", "environment"
"""Roles of what no model sampled where the template tells none: what stands before the first turn, and after it."""
_ROLES = ("system", "user", ASSISTANT, "tool")
_STAND_IN = "0123456789"
_CHARS, _ALL_CHARS = 20_000, 200_000
"""Of one message, and of a conversation."""
_NAME_CHARS = 200

Decode = Callable[[Sequence[int]], str]


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: str
    """`system`, `user`, `assistant`, `tool`, or `prompt` and `environment`."""
    sampled: bool = False
    """Whether a model has written it in this sample."""
    text: str
    start: int
    """Its first token; of messages that one stretch holds, that of the stretch."""
    num_tokens: int
    """Of the stretch; 0 for all messages of it but the first."""
    engine: str = ""
    finish_reason: str = ""
    seconds: float | None = None
    """That an engine took for a turn, or what is between two turns for the first message between them; None: not known."""


class Marks(msgspec.Struct, frozen=True):
    """How a chat template begins and ends messages."""

    headers: Mapping[str, str]
    """Role by the text before its content."""
    closing: str = ""
    """What follows a content."""


def marks_of(tokenizer: Tokenizer | None) -> Marks:
    """What the tokenizer's template writes around messages; without a template, or one that refuses to say, no role has a header."""
    if tokenizer is None:
        return Marks({})
    headers: dict[str, str] = {}
    closing = ""
    turn = [{"role": "user", "content": "."}, {"role": ASSISTANT, "content": "."}]
    before = {"system": [], ASSISTANT: turn[:1]}
    for role in _ROLES:
        opening = before.get(role, turn)
        try:
            stood = tokenizer.apply_chat_template(opening, add_generation_prompt=False) if opening else ""
            text = tokenizer.apply_chat_template([*opening, {"role": role, "content": _STAND_IN}], add_generation_prompt=False)
        except ConfigError:
            continue
        head, found, tail = text.partition(_STAND_IN)
        if found and head.startswith(stood) and (header := head[len(stood) :].strip()):
            headers[header] = role
            closing = tail.strip() if role == "user" else closing
    return Marks(headers, closing)


def conversation(sample: Sample, decode: Decode, marks: Marks) -> list[Message]:
    """The messages of a sample in order, long ones cut; those beyond a limit are left out.

    Args:
        sample: as stored.
        decode: token ids to text, special tokens written out.
        marks: of the template that it was made with.
    """
    found: list[Message] = []
    turns = {turn.start: turn for turn in sample.turns}
    ended: TurnSpan | None = None
    left = _ALL_CHARS
    for start, end, sampled in _stretches(sample):
        if left <= 0:
            break
        text = decode(sample.tokens[start:end].tolist())
        left -= min(len(text), _CHARS)
        turn = turns.get(start)
        if sampled:
            seconds = turn.finished_s - turn.asked_s if turn is not None and turn.asked_s and turn.finished_s else None
            engine, reason = (turn.engine, turn.finish_reason) if turn is not None else ("", "")
            found.append(
                Message(
                    role=ASSISTANT,
                    sampled=True,
                    text=text[:_CHARS],
                    start=start,
                    num_tokens=end - start,
                    engine=(engine or sample.engine)[:_NAME_CHARS],
                    finish_reason=(reason or (sample.finish_reason if end == len(sample.tokens) else ""))[:_NAME_CHARS],
                    seconds=seconds,
                )
            )
            ended = turn
            continue
        asked = turns.get(end)
        between = (
            asked.asked_s - ended.finished_s if asked is not None and ended is not None and ended.finished_s and asked.asked_s else None
        )
        parts = list(_messages(text, marks, ENVIRONMENT if found else PROMPT))
        for at, (role, said) in enumerate(parts):
            first = at == 0
            found.append(
                Message(
                    role=role, text=said[:_CHARS], start=start, num_tokens=(end - start) if first else 0, seconds=between if first else None
                )
            )
    return found


def _stretches(sample: Sample) -> Iterator[tuple[int, int, bool]]:
    """Start, end and whether it was sampled, of the turns and of what stands between them."""
    begins = {turn.start for turn in sample.turns}
    sampled = [span.version is not None for span in sample.spans for _ in range(span.length)]
    start = 0
    for by_model, group in groupby(sampled):
        end = start + len(list(group))
        cuts = [start, *sorted(at for at in begins if by_model and start < at < end), end]
        yield from ((first, last, by_model) for first, last in pairwise(cuts))
        start = end


def _messages(text: str, marks: Marks, otherwise: str) -> Iterator[tuple[str, str]]:
    """Role and content of the messages in a text; what stands before the first header belongs to `otherwise`, unless it says nothing."""
    if not marks.headers:
        yield otherwise, text
        return
    longest_first = sorted(marks.headers, key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
    before = _content(pieces[0], marks.closing)
    if before or len(pieces) == 1:
        yield otherwise, before
    for header, said in zip(pieces[1::2], pieces[2::2], strict=True):
        role, content = marks.headers[header], _content(said, marks.closing)
        if content or role != ASSISTANT:  # the model's own turn is begun for it
            yield role, content


def _content(text: str, closing: str) -> str:
    """A content without what ends it."""
    return (text.partition(closing)[0] if closing else text).strip()
