"""What a view decodes of messages: the parts that it uses, so that the rest of their bytes is passed over."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.monitor.numbers import Evaluation, Problem
from streamrl.schemas.events import Event
from streamrl.schemas.versions import Version

_MOST_CHARS = 400
"""Of a held-out problem's texts; people see the first words of them."""


class DropLine(msgspec.Struct, frozen=True):
    """What a view needs of a `Drop`."""

    reason: str
    rollouts: tuple[int, ...] = ()


class SpilledLine(msgspec.Struct, frozen=True):
    """What a view needs of `SpilledDrops`."""

    reasons: dict[str, int]


class GapLine(msgspec.Struct, frozen=True):
    """What a view needs of a `Gap`: that it is one."""

    lost: str


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a view needs of a `LedgerEntry`: decoding skips the sequences of every rollout, which are most of its bytes."""

    version: Version
    source: str
    cursor: int
    drops: tuple[DropLine, ...] = ()
    staleness: tuple[int, ...] = ()
    num_tokens: int = 0
    retired: int = 0
    warm: bool = False
    metrics: dict[str, float] = {}
    time_s: float = 0.0
    spilled: SpilledLine | None = None
    score: float | msgspec.UnsetType = msgspec.UNSET
    reward: float | msgspec.UnsetType = msgspec.UNSET
    histograms: dict[str, tuple[int, ...]] | msgspec.UnsetType = msgspec.UNSET
    gap: GapLine | None = None


class _ProblemDetail(msgspec.Struct, frozen=True):
    """One problem of an evaluation event."""

    prompt: Any = ""
    expected: Any = ""
    got: Any = ""
    reward: float | None = None


class _EvaluationDetail(msgspec.Struct, frozen=True):
    """The detail of an `evaluation` event."""

    version: Version | str | int
    accuracy: float
    num: int = 0
    problems: tuple[_ProblemDetail, ...] = ()


def evaluation_of(event: Event) -> Evaluation:
    """What an `evaluation` event says, its texts cut; raises SchemaError when it is none."""
    try:
        detail = msgspec.convert(event.detail, _EvaluationDetail)
    except msgspec.ValidationError as error:
        raise SchemaError(f"an evaluation event of {event.worker} cannot be read: {error}") from error
    version = detail.version
    if isinstance(version, str):
        version = Version.parse(version)
    elif isinstance(version, int):
        version = Version(0, version)
    problems = tuple(
        Problem(prompt=_cut(one.prompt), expected=_cut(one.expected), got=_cut(one.got), reward=one.reward) for one in detail.problems
    )
    return Evaluation(version=version, accuracy=detail.accuracy, num=detail.num, problems=problems, time_s=event.time_s)


def _cut(value: object) -> str:
    return str(value)[:_MOST_CHARS]
