"""A file of answers graded by a reward, in processes as producers run it: what each grader said, and whether that was expected.

A row of the JSONL file has `completion`, or `turns` of several texts; `prompt`, `label`, `metadata` as the reward is to see them in its
task; and `expected`, the reward that it should get. Where rows of the run name rewards of their own (`data.reward_key`), these may, too.
Each row is a group of one rollout.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from streamrl.config.bridges import with_options
from streamrl.config.reward import row_reward
from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.errors import ConfigError, DataError, StreamRLError
from streamrl.history.trace import printable
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Graders, Scoring
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.protocol import Failure
from streamrl.rewards.factory import make_reward, runs_in_children
from streamrl.rewards.layers import close
from streamrl.rewards.protocol import RewardValue
from streamrl.runtime.kinds import take_environment
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RewardSpec, RolloutTask
from streamrl.schemas.versions import Version

_WAITING = 4
"""Rows that are asked beside those that have a process."""
_NAMED = 5
_TEXT = 200


class _Row(msgspec.Struct, forbid_unknown_fields=True):
    completion: str | None = None
    turns: tuple[str, ...] = ()
    prompt: Any = None
    label: Any = None
    metadata: dict[str, Any] = {}
    expected: float | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    line: int
    """In the file, from 1."""
    turns: tuple[str, ...]
    prompt: Any
    label: Any
    metadata: dict[str, Any]
    expected: float | None
    """The reward that it should get; None: nobody says."""
    reward: RewardSpec | msgspec.UnsetType = msgspec.UNSET
    """The one that it names; UNSET: the run's."""


class Graded(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a row."""

    line: int
    reward: float | None
    """None: its grader gave none."""
    parts: dict[str, float]
    expected: float | None
    error: str
    timed_out: bool
    seconds: float
    """From the question to the answer."""

    @property
    def differs(self) -> bool:
        """Whether another reward, or one at all, was expected."""
        return self.expected is not None and (
            self.reward is None or not math.isclose(self.reward, self.expected, rel_tol=1e-6, abs_tol=1e-9)
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of a file."""

    rows: int
    mean: float | None
    """Of the rewards; None: there is none."""
    failed: int
    timed_out: int
    """Of those that failed."""
    differ: int
    """Rows with another reward than `expected`, or none."""

    @property
    def held(self) -> bool:
        """Whether every row has a reward, and the expected one."""
        return not self.failed and not self.differ


def read_rows(path: Path, data: DataConfig | None = None) -> list[Row]:
    """The rows of a file; empty lines are left out.

    Args:
        path: of the file.
        data: says which field names a row's own reward; None: rows may name none.

    Raises:
        DataError: it cannot be read, has no row, or rows that are none, the first of which are named by line.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", hint="name a JSONL file of answers", path=str(path), line=0) from error
    found: list[Row] = []
    broken: list[tuple[int, str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_row(number, line, data or DataConfig()))
            except (ValueError, RecursionError) as error:  # what msgspec raises is a ValueError
                broken.append((number, str(error)))
            except ConfigError as error:
                broken.append((number, error.message))
    if broken or not found:
        said = "; ".join(f"line {number}: {why}" for number, why in broken[:_NAMED])
        more = f"; {len(broken) - _NAMED} more lines" if len(broken) > _NAMED else ""
        raise DataError(
            f"{path}: expected rows with prompt, label and completion (or turns), got {said + more or 'none'}",
            hint='for example {"prompt": "3+4=", "label": "7", "completion": "7", "expected": 1.0}',
            path=str(path),
            line=broken[0][0] if broken else 0,
        )
    return found


def _row(number: int, line: bytes, data: DataConfig) -> Row:
    table = msgspec.json.decode(line, type=dict[str, Any])
    named = table.pop(data.reward_key, None) if data.reward_key else None
    row = msgspec.convert(table, _Row)
    if (row.completion is None) == (not row.turns):
        raise ValueError("expected either completion or turns")
    if row.expected is not None and not math.isfinite(row.expected):
        raise ValueError(f"expected must be finite, got {row.expected}")
    turns = row.turns or (row.completion or "",)
    return Row(
        line=number,
        turns=turns,
        prompt=row.prompt,
        label=row.label,
        metadata=row.metadata,
        expected=row.expected,
        reward=msgspec.UNSET if named is None else row_reward(named, data.reward_options),
    )


async def grade(rows: Sequence[Row], reward: RewardConfig, config: Config) -> list[Graded]:
    """The rows, graded, in their order.

    Args:
        rows: of the file.
        reward: the reward.
        config: of the run whose reward it is: how it is run.

    Raises:
        ConfigError: the reward cannot be loaded.
    """
    by_row = bool(config.data.reward_key)
    if not runs_in_children(reward, by_row=by_row):
        built_in = make_reward(reward)
        assert built_in is not None  # `late` has been refused
        score = built_in.score
        try:
            return [await _graded(row, lambda task, episode: score(task, [episode])) for row in rows]
        finally:
            await close(built_in)
    take_environment(config, "producer")
    hello = Hello(
        reward=reward.kind,
        reward_options=with_options(config, config.model.path, reward.kind, reward.options),
        reward_key=reward.key,
        by_row=config.data.reward_options if by_row else None,
        model_dir="",
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
        memory_bytes=config.producer.child_memory_bytes,
    )
    # Nobody is ended before its time here: as many may hang as are asked at once.
    graders = Graders(hello, msgspec.structs.replace(Scoring.of(reward), max_hung=1 << 20))
    try:
        await graders.start()
        asked = asyncio.Semaphore(graders.seats + _WAITING)

        async def one(row: Row) -> Graded:
            async with asked:
                return await _graded(row, lambda task, episode: graders.score(task, [episode]))

        return list(await asyncio.gather(*map(one, rows)))
    finally:
        await graders.close()


async def _graded(row: Row, score: Any) -> Graded:
    task = RolloutTask(
        run="check",
        index=row.line,
        row=row.line,
        source="main",
        prompt=row.prompt,
        label=row.label,
        metadata=row.metadata,
        reward=row.reward,
    )
    answer = Segment([0], [0.0], (VersionSpan(1, Version(0, 0)),))
    thinking = isinstance(row.prompt, str) and len(row.turns) == 1 and row.prompt.rstrip().endswith("<think>")
    episode = Episode(segments=(Segment([0]), answer), finish_reason="stop", turns=row.turns, thinking=thinking)
    start_s = time.perf_counter()
    try:
        given: RewardValue | Exception | Failure
        values = await score(task, episode)
        given = values if isinstance(values, Failure) else values[0]
    except ConfigError:
        raise
    except Exception as error:  # a reward that is no child's raises what it likes: as in a producer, that fails its rollout
        given = error
    seconds = time.perf_counter() - start_s
    if isinstance(given, RewardValue):
        reward, parts, error, timed_out = given.value, given.parts, "", False
    elif isinstance(given, Failure):
        reward, parts, error, timed_out = None, {}, given.detail, given.reason == "timeout"
    else:
        text = given.message if isinstance(given, StreamRLError) else str(given) or type(given).__name__
        reward, parts, error, timed_out = None, {}, text, isinstance(given, TimeoutError)
    return Graded(
        line=row.line, reward=reward, parts=parts, expected=row.expected, error=error, timed_out=timed_out, seconds=round(seconds, 4)
    )


def summary_of(graded: Sequence[Graded]) -> Summary:
    """The whole file in numbers."""
    rewards = [one.reward for one in graded if one.reward is not None]
    return Summary(
        rows=len(graded),
        mean=fmean(rewards) if rewards else None,
        failed=len(graded) - len(rewards),
        timed_out=sum(one.timed_out for one in graded),
        differ=sum(one.differs for one in graded),
    )


def graded_text(graded: Sequence[Graded]) -> str:
    """A line for each row, and the summary."""
    lines = [f"{'LINE':>6}  {'REWARD':>9}  {'EXPECTED':>9}  {'SECONDS':>8}"]
    for one in graded:
        reward, expected = ("-" if value is None else f"{value:.6g}" for value in (one.reward, one.expected))
        parts = " ".join(f"{name}={value:.6g}" for name, value in one.parts.items())
        said = f"timed out: {one.error}" if one.timed_out else f"failed: {one.error}" if one.error else parts
        said = ("differs  " if one.differs and not one.error else "") + printable(said[:_TEXT])
        lines.append(f"{one.line:>6}  {reward:>9}  {expected:>9}  {one.seconds:>8.3f}  {said}".rstrip())
    total = summary_of(graded)
    mean = "no reward" if total.mean is None else f"mean reward {total.mean:.6g}"
    lines += ["", f"{total.rows} rows: {mean}, {total.failed} failed ({total.timed_out} timed out), {total.differ} not as expected"]
    reasons = Counter(one.error for one in graded if one.error)
    lines += [f"{count:>6} x {printable(why[:_TEXT])}" for why, count in reasons.most_common(_NAMED) if count > 1]
    return "\n".join(lines)
