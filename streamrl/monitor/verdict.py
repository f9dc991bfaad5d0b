"""One sentence on a run: does it learn, by what evidence, and what is its bottleneck. Plain functions over numbers; no clock, no bus."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from streamrl.monitor.drawing import visible
from streamrl.monitor.numbers import Evaluation, Learning, Verdict
from streamrl.monitor.screen import by_text, short
from streamrl.monitor.slo import Signs, causes
from streamrl.monitor.waits import loading

FEWEST = 5
"""Batches at the beginning, and at the end, that say anything of a trend."""
_SURE, _SURE_OF_FEW = 3.0, 10.0
"""A change counts above so many standard errors of it, and of a mean over n batches `_SURE_OF_FEW / n` more."""
_LEAST = 1e-6
"""A change below this part of the values is rounding."""
_RULE_OF_THREE = 3.0
"""Over the number of problems it bounds a share of which no case was seen: an interval of no width is not taken for certainty."""
_PACE, _STARVED = 0.2, 0.5
"""A trainer that waits for samples less than the first part of its time is the bottleneck; beyond the second, what makes samples is."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that tell if a run learns."""

    num_batches: int = 0
    """Trained ones, without the warm-up."""
    warming: bool = False
    """The newest is of the warm-up."""
    first: Sequence[float] = ()
    """Rewards of the first batches, or losses in runs of kind `sft`, as the summary compares them."""
    last: Sequence[float] = ()
    """As many of the last ones."""
    is_loss: bool = False
    evaluations: Sequence[Evaluation] = ()
    """Evaluations of the first set of problems since reinforcement learning began, by version."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds of trainer and engines; None: not known."""

    trainer: float | None = None
    """Tokens that the trainer takes in a second of its steps, by the loss mask."""
    waits: float | None = None
    """Part of the trainer's time in which it waits for samples, before its first batch left out."""
    engines: float | None = None
    """Tokens that all engines for rollouts sample a second."""


def verdict(evidence: Evidence, signs: Signs, pace: Pace, *, over: bool = False) -> Verdict:
    """The sentence.

    Args:
        evidence: by the ledger and the evaluations.
        signs: of this moment, or with the whole run as its window.
        pace: likewise.
        over: the run has ended, and `signs` are of all of it.
    """
    if not over and (names := loading(signs.numbers)):
        return Verdict(learning=Learning.LOADING, text=f"Loading the model: {', '.join(names)}.")
    learning, said = learned(evidence)
    standing = None if over else signs.numbers.standing
    limit = f"nothing moves, the run waits for {standing.what}" if standing else _bottleneck(evidence, signs, pace, over=over)
    return Verdict(learning=learning, text=visible(" ".join(f"{said}{f'; {limit}' if limit else ''}.".split())))


def learned(evidence: Evidence) -> tuple[Learning, str]:
    """Decide if it learns, with the evidence in words. Problems held out decide where they can; else the rewards, or losses, do."""
    first, last = ([value for value in part if math.isfinite(value)] for part in (evidence.first, evidence.last))
    evidence = replace(evidence, first=first, last=last)
    heldout, of_heldout = _by_heldout(evidence.evaluations)
    trend = _trend(evidence.first, evidence.last)
    of_batches = _batches_words(evidence, trend)
    if trend is not None and evidence.is_loss:
        trend = -trend
    if heldout:
        # What is trained on may rise while what was held out falls: both are said where they differ.
        said = of_heldout if trend in (None, heldout) else f"{of_heldout}, {of_batches}"
    else:
        compared = len({one.version for one in evidence.evaluations}) > 1
        said = ", ".join(part for part in (of_batches, f"{of_heldout} undecided" if trend and compared else of_heldout) if part)
    sure = heldout or trend
    if sure:
        return (Learning.RISING, f"Learning: {said}") if sure > 0 else (Learning.FALLING, f"Getting worse: {said}")
    if trend is None:
        return Learning.EARLY, f"Too early to say whether it learns: {said}"
    return Learning.UNDECIDED, f"No clear change yet: {said}"


def _by_heldout(evaluations: Sequence[Evaluation]) -> tuple[int, str]:
    """Compare the intervals of the first and the last evaluation: 1 and -1 where they do not overlap, 0 where that is not known."""
    known = [one for one in evaluations if one.accuracy is not None]
    if not known:
        return 0, ""
    first, last = known[0], known[-1]
    name = "held-out" if last.set == "heldout" else last.set
    now = (
        f"{last.accuracy:.2f}"
        + (f" ({last.interval[0]:.2f} to {last.interval[1]:.2f})" if last.interval else "")
        + by_text(last.answered_by)
    )
    num_batches = last.version.number - first.version.number
    if num_batches <= 0:
        return 0, f"{name} {now}"
    said = f"{name} {first.accuracy:.2f}{by_text(first.answered_by)} -> {now} in {num_batches} batches"
    before, after = _bounds(first), _bounds(last)
    if before is None or after is None:
        return 0, said
    return (after[0] > before[1]) - (after[1] < before[0]), said


def _bounds(one: Evaluation) -> tuple[float, float] | None:
    if one.interval is None or one.accuracy is None:
        return None
    low, high = one.interval
    if high - low > 0:
        return low, high
    room = _RULE_OF_THREE / max(1, one.num) * max(1.0, abs(one.accuracy))
    return low - room, high + room


def _trend(first: Sequence[float], last: Sequence[float]) -> int | None:
    """Return 1, -1, or 0 for no change beyond chance; None: too few batches to say."""
    if min(len(first), len(last)) < FEWEST:
        return None
    change = statistics.fmean(last) - statistics.fmean(first)
    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(last) / len(last))
    least = (_SURE + _SURE_OF_FEW / min(len(first), len(last))) * error
    if abs(change) <= max(least, _LEAST * max(map(abs, (*first, *last)))):
        return 0
    return 1 if change > 0 else -1


def _batches_words(evidence: Evidence, trend: int | None) -> str:
    name = "loss" if evidence.is_loss else "reward"
    if not evidence.num_batches:
        return "the warm-up goes on" if evidence.warming else "no batch has been trained"
    count = f"{evidence.num_batches} batch{'es' if evidence.num_batches > 1 else ''}"
    if not evidence.last:
        return f"{count} without a {name}"
    if trend is None:
        return f"{name} {statistics.fmean(evidence.last):.2f} after {count}"
    first, last = (statistics.fmean(part) for part in (evidence.first, evidence.last))
    if len({*evidence.first, *evidence.last}) == 1:
        return f"{name} is {last:.2f} in each of {count}"
    return f"{name} {first:.2f} -> {last:.2f} in {count}"


def _bottleneck(evidence: Evidence, signs: Signs, pace: Pace, *, over: bool) -> str:
    """Who keeps the others waiting, and what would help; empty where that is not known."""
    waits = pace.waits
    if waits is None or not (evidence.num_batches or evidence.warming):
        return ""
    make, take, wait = ("made", "took", "waited") if over else ("make", "takes", "waits")
    waiting = f"{wait} {waits:.0%} of its time for samples"
    if waits < _PACE:
        kind = "tokens" if evidence.is_loss else "sampled tokens"
        takes = "" if pace.trainer is None else f"{take} {short(pace.trainer)} {kind}/s and "
        return f"the trainer {takes}{waiting}: add ranks (trainer.ranks), or a faster trainer.device"
    made = "" if pace.engines is None or pace.engines < 1 else f"engines {make} {short(pace.engines)} tokens/s, "
    could = "could have taken" if over else "could take"
    trainer = (
        f"the trainer {waiting}" if pace.trainer is None else f"the trainer {could} {short(pace.trainer)}{'' if made else ' tokens/s'}"
    )
    both = made + trainer
    if waits <= _STARVED:
        return f"{both}: they {'kept' if over else 'keep'} pace" if made else f"the trainer {waiting}"
    if evidence.is_loss:
        return f"the trainer {waiting}: rows come too slowly"
    cause = causes("starvation", signs)[0]
    if cause.name not in ("slow_engine", "few_producers"):
        return f"{both}: {cause.what} ({cause.hint})"
    idle, held, free = signs.share("engine", "idle"), signs.share("engine", "held"), signs.share("producer", "wait_credit")
    if held >= _PACE or (idle >= _STARVED and free >= _STARVED):
        return f"{both}: engines stand still {idle + held:.0%} of the time for want of tasks or versions, raise tasks.max_staleness"
    if idle >= _STARVED or (cause.name == "few_producers" and not over):
        return f"{both}: engines are idle {idle:.0%} of the time, raise producer.concurrency or producer.workers"
    return f"{both}: add engines"
