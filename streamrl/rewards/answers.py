r"""Where a completion's answer stands, and what the label of a row says: text in, text out, in linear time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.rewards.protocol import ScoredEpisode
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask

_BOX = re.compile(r"\\(?:boxed|fbox)\s{0,8}(?:\{|(?P<bare>-?\d[\d.,/]{0,40}|(?<=\s)[^\s{}$\\.]{1,40}))")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_NAMED = re.compile(r"(?:\\?[a-zA-Z]\w{0,8}(?:_\{?\w{1,4}\}?)?\s{0,4}=\s{0,4})\$?\s{0,2}\Z")
_JOINED = re.compile(
    r"[\s$.*]{0,8}(?P<by>[,;]|or|and|\\text\s?\{\s?(?:or|and)\s?\}|\\quad){1,2}(?P<between>[\s$*,]{0,8})(?P<name>(?:\\?[a-zA-Z]\w{0,8}\s?=\s?)?\$?\s?)"
)


_MOST_JOINED = 24
HEADING = r"^\s{0,8}(?:[#>*_]\s?){1,6}(?:final\s|the\s){0,2}answer[*_]{0,3}[ \t]*\n\s{0,8}"
"""A line of Markdown that says only that the answer follows."""
_MARKER = re.compile(rf"\banswer(?:\*\*|__)?\s{{0,4}}(?:is|=|:|\uff1a)(?:\*\*|__)?|{HEADING}", re.IGNORECASE | re.MULTILINE)
_REMARK = re.compile(r"(?:in)?(?:correct|right|wrong|valid|reasonable|consistent|verified|confirmed|clear|final)\b", re.IGNORECASE)
_SET_OFF = re.compile(
    r"(?<!\w)__([^_\n]{1,300})__(?!\w)|`([^`\n]{1,300})`|\*\*([^*\n]{1,300})\*\*|\$\$([^$]{1,300})\$\$|\$([^$\n]{1,300})\$|\\\(([^\n]{1,300}?)\\\)|\\\[(.{1,300}?)\\\]",
    re.DOTALL,
)
_SENTENCE = re.compile(r"[.!?](?:\s+(?=[A-Z])|\s*$)")
_LINE = 400
_MOST_BEHIND = 60


class Box(msgspec.Struct, frozen=True):
    """A box of a text that holds something."""

    begin: int
    end: int
    held: str


def boxes(text: str) -> list[Box]:
    r"""Each `\boxed{}` or `\fbox{}` that holds something, nested ones too; none at all where the last one is not closed."""
    found: list[Box] = []
    ends: dict[int, int] = {}
    opened: list[int] = []
    starts = list(_BOX.finditer(text))
    if not starts:
        return []
    for brace in _BRACES.finditer(text, starts[0].start() + 1):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            ends[opened.pop()] = brace.start()
    for start in starts:
        if start["bare"] is not None:
            found.append(Box(start.start(), start.end(), start["bare"].rstrip(".,")))
        elif (end := ends.get(start.end() - 1)) is not None:
            found.append(Box(start.start(), end + 1, text[start.end() : end].strip()))
        elif start is starts[-1]:
            return []
    return [box for box in found if box.held] or found[-1:]


def last_box(text: str) -> str | None:
    r"""Return what the last `\boxed{}` or `\fbox{}` that is not empty holds; None: there is none, or the last one is not closed."""
    found = boxes(text)
    return found[-1].held if found else None


def boxed_answers(text: str) -> list[str]:
    r"""Return what is meant by the last box, in one or two readings; empty where there is none.

    Boxes that a text joins, `\boxed{2} or \boxed{3}`, are one answer. With names that differ, as in `a = \boxed{4}, b = \boxed{2}`, the
    last one alone may be the answer.
    """
    found = boxes(text)
    joined = found[-1:]
    for before in reversed(found[-_MOST_JOINED:-1]):
        between = text[before.end : joined[0].begin]
        if len(between) > 60 or not _JOINED.fullmatch(between):
            break
        joined.insert(0, before)
    if len(joined) < 2 or len({box.held for box in joined}) == 1:
        return [box.held for box in joined[-1:]]
    names = [match[0].strip(" $") if (match := _NAMED.search(text[max(0, box.begin - 40) : box.begin])) else "" for box in joined]
    by = " or " if "or" in text[joined[0].end : joined[-1].begin] else ", "
    together = by.join(name + box.held for name, box in zip(names, joined, strict=True))
    return [together, joined[-1].held] if len({name for name in names if name}) > 1 else [together]


def unclosed_box(text: str) -> str | None:
    """Return what stands behind a last box that is not closed, up to the end of its line; None where there is no such box."""
    starts = list(_BOX.finditer(text))
    if not starts or boxes(text) or starts[-1]["bare"] is not None:
        return None
    return text[starts[-1].end() :].partition("\n")[0].strip(" $.")


def stated(text: str) -> str | None:
    """Return what a text without a box states as its answer; None where there is no such place.

    It stands behind the last `####`, behind the last `answer is` or `Answer:`, or is set off (`**73**`, `$73$`) at the end.
    """
    if "####" in text:
        behind = text.rpartition("####")[2].strip().partition("\n")[0]
        if behind:
            return _clause(behind)
    for marker in reversed(list(_MARKER.finditer(text))):
        line = text[marker.end() : marker.end() + _LINE].strip().partition("\n")[0]
        if line and not _REMARK.match(line):
            return _clause(line)
    end = text[-_LINE:].rstrip()
    for found in reversed(list(_SET_OFF.finditer(end))):
        behind = end[found.end() :]
        return None if len(behind) > _MOST_BEHIND or any(map(str.isdigit, behind)) else _held(found)
    return None


def _clause(line: str) -> str:
    """The first sentence of a line, or the one thing that is set off in it where nothing beside it could be the answer."""
    line = _SENTENCE.split(line, maxsplit=1)[0].strip()
    found = list(_SET_OFF.finditer(line))
    if found and found[0].start() == 0 and not re.match(r"[\s$*,;]*(?:,|;|or\b|and\b|=|[-+<>])", line[found[0].end() :]):
        return _held(found[0])
    if len(found) == 1:
        beside = line[: found[0].start()] + line[found[0].end() :]
        if not re.search(r"\d|\bor\b|\band\b|=", beside):
            return _held(found[0])
    return line


def _held(found: re.Match[str]) -> str:
    return next(group for group in found.groups() if group is not None).strip().rstrip(".:")


def without_reasoning(text: str, *, thinking: bool = False) -> str | None:
    """Return what stands behind the last `</think>`, or the whole; None where reasoning begins and does not end.

    Args:
        text: of a turn.
        thinking: whether the prompt has opened the thought that the text begins in.
    """
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return None if thinking or "<think>" in text else text


def answering(episode: ScoredEpisode) -> str | None:
    """The last turn without its thought; None where the thought did not end, so that there is nothing to grade."""
    return without_reasoning(episode.completion, thinking=episode.thinking)


def labels(task: RolloutTask) -> list[str]:
    r"""The answers that are right: the label, or each of a list of them; of a boxed one what the box holds, of `... #### 72` 72.

    Raises:
        SchemaError: the row has none, or one that is neither text nor number.
    """
    given = task.label if isinstance(task.label, list | tuple) else [task.label]
    found = [_label(one, task) for one in given]
    if not found:
        raise SchemaError(f"row {task.row} has an empty list of labels, a right answer is needed", row=task.row)
    return found


def _label(given: Any, task: RolloutTask) -> str:
    if isinstance(given, bool) or not isinstance(given, str | int | float):
        hint = "data.label_key names the field with the right answer"
        raise SchemaError(f"row {task.row}: expected a text or a number as label, got {type(given).__name__}", hint=hint, row=task.row)
    text = str(given)
    box = last_box(text)
    return box if box is not None else text.rpartition("####")[2].strip()


class BoxedEpisode(msgspec.Struct, frozen=True):
    """An episode whose completion is what its last box holds; the empty text where there is none."""

    episode: ScoredEpisode

    @property
    def rollout(self) -> int:
        return self.episode.rollout

    @property
    def completion(self) -> str:
        return next(iter(boxed_answers(answering(self.episode) or "")), "")

    @property
    def thinking(self) -> bool:
        return False  # its thought is not in the box

    @property
    def turns(self) -> Sequence[str]:
        return (*self.episode.turns[:-1], self.completion)

    @property
    def agent(self) -> str:
        return self.episode.agent

    @property
    def status(self) -> Status:
        return self.episode.status

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.episode.metadata
