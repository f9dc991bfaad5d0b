"""A task's life as text for a terminal of 80 columns."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator

from streamrl.history.trace_life import Life, RolloutLife, SampleLife, TurnLife, counted, images_text
from streamrl.schemas.ledger import ranges

WIDTH = 80
_NOT_RECORDED = "not recorded"


def life_text(life: Life) -> str:
    """Lines of at most 80 columns; times are seconds since the first that is known."""
    return "\n".join(line for line in _lines(life))


def _lines(life: Life) -> Iterator[str]:
    known = [life.claim.issued_s, life.claim.claimed_s] if life.claim is not None else []
    known += [one.stored_s or None for one in life.messages]
    start = next((value for value in known if value), None)
    number = counted(life.group_size, "rollout")
    yield from _row("", f"task {life.task} of run {life.run} ({', '.join(filter(None, (life.source, number)))}): {life.detail}", indent=2)
    yield ""
    yield from _row("issued", f"{_day(start) if start else _NOT_RECORDED}  {life.credit}")
    claim = life.claim
    if claim is not None:
        again = f"; delivery {claim.deliveries}" if claim.deliveries > 1 else ""
        if again and len(claim.earlier) < claim.deliveries - 1:
            again += f", {'those' if not claim.earlier else 'some'} before it left no record"
        who = f"by {claim.producer}" if claim.producer else "by whom was not recorded"
        for one in claim.earlier:
            yield from _row("had by", f"{one.producer}, by its reports from {_after(one.first_s, start)} to {_after(one.last_s, start)}")
        yield from _row("claimed", f"{_after(claim.claimed_s, start)}  {who}{again}")
    for one in life.messages:
        about = f"rollouts {_ranges(one.rollouts)}: " if one.rollouts else ""
        yield from _row("stored", f"{_after(one.stored_s or None, start)}  message {one.sequence}, {one.kind}: {about}{one.detail}")
        yield from _row("", f"folded before version {one.folded} closed" if one.folded else "not folded yet")
        for drop in one.drops:
            yield from _row("", f"not trained, {drop}")
    if life.version is not None:
        yield from _row("ended", f"{_after(life.ended_s, start)}  {life.detail}")
    for rollout in life.rollouts:
        yield ""
        yield from _rollout(rollout, start)
    for note in life.notes:
        yield ""
        yield from _row("note", note)


def _rollout(rollout: RolloutLife, start: float | None) -> Iterator[str]:
    yield from _row("", f"rollout {rollout.rollout}: {rollout.state}{': ' + rollout.why if rollout.why else ''}", indent=2)
    for sample in rollout.samples:
        parts = "".join(f", {name} {value:g}" for name, value in sample.reward_parts.items())
        reward = "none yet" if sample.reward is None else f"{sample.reward:g}{f' ({parts[2:]})' if parts else ''}"
        if sample.demonstration:
            reward = "none, a demonstration"
        name = f"sample {sample.sample}" if len(rollout.samples) > 1 else "sample"
        agent = f"agent {printable(sample.agent)}, " if sample.agent else ""
        yield from _row(name, f"{agent}{counted(sample.tokens, 'token')}, {sample.trained_tokens} trained on; {sample.status}")
        if sample.images:
            yield from _row("images", images_text(sample.images))
        yield from _turns(sample, start)
        scored = f"{_after(sample.scored_s, start)}  " if sample.scored_s or sample.reward is not None else ""
        yield from _row("reward", f"{'' if sample.demonstration else scored}{reward}")


def _turns(sample: SampleLife, start: float | None) -> Iterator[str]:
    before: TurnLife | None = None
    for number, turn in enumerate(sample.turns, 1):
        if before is not None:
            took = f", {turn.asked_s - before.finished_s:.3f} s" if turn.asked_s and before.finished_s else ""
            yield from _row("tools", f"{counted(turn.before, 'token')}{took}")
        times = f"asked {_after(turn.asked_s, start)}, began {_after(turn.began_s, start)}, finished {_after(turn.finished_s, start)}"
        if turn.asked_s is None and turn.began_s is None and turn.finished_s is None:
            times = f"times {_NOT_RECORDED}"
        where = " ".join(filter(None, (turn.engine, turn.finish_reason)))
        yield from _row(f"turn {number}", f"{times}{f' ({where})' if where else ''}")
        for part in turn.versions:
            age = "" if part.age is None else f", {counted(part.age)} old when trained"
            yield from _row("", f"{counted(part.tokens, 'token')} of version {part.version}{age}")
        before = turn


def _row(name: str, text: str, *, indent: int = 12) -> Iterator[str]:
    text = printable(text)  # reasons and names of parts are the user's
    if indent != 12:
        yield from textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent)
        return
    yield from textwrap.wrap(text, WIDTH, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12) or [f"  {name}"]


def _day(seconds: float) -> str:
    whole = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}"


def _after(seconds: float | None, start: float | None) -> str:
    return _NOT_RECORDED if seconds is None or start is None else f"{seconds - start:+.3f} s"


def _ranges(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ranges(numbers))


def printable(text: str, *, lines: bool = False) -> str:
    """The text with what would move a terminal's cursor or colours written as escapes; line breaks stay where `lines` are wanted."""
    return "".join(c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)
