"""What a view decodes of messages: the parts that it uses, so that the rest of their bytes is passed over."""

from __future__ import annotations

from typing import Any

import msgspec

from streamrl.config.evaluation_sets import HELDOUT
from streamrl.errors import SchemaError
from streamrl.monitor.numbers import Evaluation, Problem
from streamrl.schemas.events import Event
from streamrl.schemas.subjects import RUN_ID
from streamrl.schemas.versions import Version

_LONGEST_SET = 64
_LONGEST_VERSION = 40
_MOST_RATES = 32
_MOST_CHARS = 400
"""Of a held-out problem's texts; people see the first words of them."""


class DropLine(msgspec.Struct, frozen=True):
    """What a view needs of a `Drop`."""

    reason: str
    rollouts: tuple[int, ...] = ()


class SpilledLine(msgspec.Struct, frozen=True):
    """What a view needs of `SpilledDrops`."""

    reasons: dict[str, int]


class UsedLine(msgspec.Struct, frozen=True):
    """The part of a `Used` that a view needs."""

    rollouts: tuple[int, ...]


class GapLine(msgspec.Struct, frozen=True):
    """What a view needs of a `Gap`: that it is one."""

    lost: str


class LedgerLine(msgspec.Struct, frozen=True, kw_only=True):
    """What a view needs of a `LedgerEntry`: decoding skips the sequences of every rollout, which are most of its bytes."""

    version: Version
    source: str
    cursor: int
    used: tuple[UsedLine, ...] = ()
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


class _RateDetail(msgspec.Struct, frozen=True):
    """One pass@k or maj@k."""

    value: float


class _EvaluationDetail(msgspec.Struct, frozen=True):
    """The detail of an `evaluation` event."""

    version: Version | str | int
    accuracy: float | None
    num: int = 0
    problems: tuple[_ProblemDetail, ...] = ()
    set: str = HELDOUT
    versions: tuple[str, ...] = ()
    pinned: bool = False
    interval: tuple[float, float] | None = None
    samples: int = 0
    answered: int = 0
    truncated: int = 0
    took_s: float | None = None
    passes: dict[int, _RateDetail] = msgspec.field(name="pass", default_factory=dict)
    majority: dict[int, _RateDetail] = {}
    tokens: dict[str, float] = {}


def evaluation_of(event: Event) -> Evaluation:
    """What an `evaluation` event says, its texts cut; raises SchemaError when it is none."""
    try:
        detail = msgspec.convert(event.detail, _EvaluationDetail, str_keys=True)
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
    if not RUN_ID.fullmatch(detail.set) or len(detail.set) > _LONGEST_SET:
        raise SchemaError(f"an evaluation event of {event.worker} has no name of a set: {detail.set[:80]!r}")
    return Evaluation(
        version=version,
        accuracy=detail.accuracy,
        num=detail.num,
        problems=problems,
        time_s=event.time_s,
        set=detail.set,
        versions=tuple(one[:_LONGEST_VERSION] for one in detail.versions[:2]),
        pinned=detail.pinned,
        interval=detail.interval,
        passes={k: rate.value for k, rate in list(detail.passes.items())[:_MOST_RATES]},
        majorities={k: rate.value for k, rate in list(detail.majority.items())[:_MOST_RATES]},
        truncated_ratio=detail.truncated / detail.answered if detail.answered else None,
        failed_ratio=(detail.samples - detail.answered) / detail.samples if detail.samples else None,
        response_len=detail.tokens.get("mean"),
        took_s=detail.took_s,
    )


def _cut(value: object) -> str:
    return str(value)[:_MOST_CHARS]
