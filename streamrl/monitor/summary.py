"""What a run came to: `summary.json`, one line, and the fixed held-out problems before and after."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.config.evaluation_sets import HELDOUT
from streamrl.monitor.failed_share import failed_of
from streamrl.monitor.glance import account_words, ends, learning, verdict_over
from streamrl.monitor.numbers import Account, Evaluation, Point, Problem
from streamrl.monitor.rates import counted_quantile
from streamrl.monitor.screen import by_text, clock, decimal, drops_text, short
from streamrl.monitor.view import RunView

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

_NUM_PROBLEMS = 8
_MAX_CELL = 48


class SetSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A set of problems when reinforcement learning began, and at its last evaluation."""

    first: float | None
    """Mean reward."""
    last: float | None
    passes: dict[int, float] = {}
    """pass@k at the last."""
    failed_ratio: float | None = None
    """Of its samples at the last."""
    first_by: str = ""
    """The versions that answered at first, as `versions 0.4 to 0.9`, where they are others than the one that was to be evaluated."""
    last_by: str = ""
    """The same at the last."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of `summary.json`. None: there was nothing to measure."""

    steps: int
    """Batches trained by reinforcement learning; the warm-up is not counted."""
    reward_first: float | None
    """Mean reward of the first 20 of them; of fewer than 40, of their first half."""
    reward_last: float | None
    """Mean reward of as many, the last ones."""
    loss_first: float | None = None
    """In runs of kind `sft`: the mean negative log-likelihood a token of as many batches, the first ones, in nats."""
    loss_last: float | None = None
    """The same of the last ones."""
    heldout_first: float | None
    """Held-out accuracy when reinforcement learning began."""
    heldout_last: float | None
    evaluations: dict[str, SetSummary] = {}
    """By set of problems."""
    tokens_made: int
    """Sampled by the engines."""
    tokens_trained: int
    """In trained batches, prompts and warm-up included."""
    staleness_p50: float
    """Median age of the trained groups, in versions."""
    staleness_max: int
    dropped: int
    """Rollouts that were decided against, for any reason."""
    drops: dict[str, int] = {}
    """The same by reason."""
    failed_rollouts: int = 0
    """Failures and time-outs among them."""
    ended_rollouts: int = 0
    """Rollouts that were trained or decided against."""
    newest_error: str = ""
    """Why a rollout failed last, as far as the last session has seen it."""
    unusable_rows: tuple[str, ...] = ()
    """The first rows of the data that the last session has dropped: what is wrong, with their file and line."""
    slo: dict[str, str] = {}
    """Objectives of the section `slo` that were not met at some time, with their worst level."""
    swaps: int
    """Weight versions that engines took while they ran."""
    wall_s: float
    """Time that the run was up, all its sessions together."""
    account: Account | None = None
    """Share of the rollouts trained, time of workers and GPUs; None: of an earlier build."""
    verdict: str = ""
    """One sentence: has it learned, and what was its bottleneck."""


def summarize(view: RunView, *, wall_s: float) -> Summary:
    """The summary of what `view` has seen."""
    trained = view.trained
    rewarded, points = ends(trained.num_reinforced), ends(len(view.reward_points))
    first, last = trained.first_rewards(rewarded), trained.last_rewards(rewarded)
    evaluations = learning_evaluations(view)
    return Summary(
        steps=trained.num_reinforced,
        reward_first=statistics.fmean(first) if first else None,
        reward_last=statistics.fmean(last) if last else None,
        loss_first=_mean_loss(view.reward_points[:points]),
        loss_last=_mean_loss(view.reward_points[-points:]),
        heldout_first=evaluations[0].accuracy if evaluations else None,
        heldout_last=evaluations[-1].accuracy if evaluations else None,
        evaluations={name: _set_summary(learning(view, view.evaluated.of(name))) for name in view.evaluated.sets},
        tokens_made=view.tokens_made,
        tokens_trained=view.tokens_trained,
        staleness_p50=counted_quantile(trained.ages, 0.5),
        staleness_max=max(trained.ages, default=0),
        dropped=view.all_drops.total(),
        drops=dict(view.all_drops),
        failed_rollouts=failed_of(view.all_drops),
        ended_rollouts=trained.num_rollouts + view.all_drops.total(),
        newest_error=view.failures.newest,
        unusable_rows=tuple(view.failures.rows),
        slo={objective: str(level) for objective, level in view.slo_worst.items()},
        swaps=view.swaps,
        wall_s=round(wall_s, 2),
        account=view.account,
        verdict=verdict_over(view).text,
    )


def _mean_loss(points: Sequence[Point]) -> float | None:
    losses = [point.loss for point in points if point.loss is not None]
    return statistics.fmean(losses) if losses else None


def learning_evaluations(view: RunView) -> list[Evaluation]:
    """Evaluations from the end of the warm-up on, by version, the newest of each; all of them if there are none after it."""
    return learning(view, view.evaluations)


def _set_summary(found: Sequence[Evaluation]) -> SetSummary:
    first, last = found[0], found[-1]
    return SetSummary(
        first=first.accuracy,
        last=last.accuracy,
        passes=last.passes,
        failed_ratio=last.failed_ratio,
        first_by=first.answered_by,
        last_by=last.answered_by,
    )


def write_summary(summary: Summary, path: Path) -> None:
    """Write `summary.json`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def read_summary(path: Path) -> Summary | None:
    """Return the summary of the last time the run stopped; None if it never has, if another version wrote it or if it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (OSError, msgspec.MsgspecError):
        return None


def summary_line(summary: Summary) -> str:
    """The run in one line."""
    parts = [f"{summary.steps} steps in {clock(summary.wall_s)}"]
    held = summary.evaluations.get(HELDOUT) or next(iter(summary.evaluations.values()), SetSummary(first=None, last=None))
    if summary.reward_first is not None and summary.reward_last is not None:
        parts.append(f"reward {decimal(summary.reward_first)} -> {decimal(summary.reward_last)}")
    if summary.loss_first is not None and summary.loss_last is not None:
        parts.append(f"loss {decimal(summary.loss_first)} -> {decimal(summary.loss_last)}")
    if summary.heldout_first is not None and summary.heldout_last is not None:
        first, last = f"{decimal(summary.heldout_first)}{by_text(held.first_by)}", f"{decimal(summary.heldout_last)}{by_text(held.last_by)}"
        parts.append(f"held-out {first} -> {last}")
    count, _, why = drops_text(summary.dropped, summary.drops).partition(" ")
    parts += [
        f"{short(summary.tokens_made)} tokens made, {short(summary.tokens_trained)} trained",
        f"staleness p50 {summary.staleness_p50:g} max {summary.staleness_max}",
        f"{count} dropped {why}".rstrip(),
        f"{summary.swaps} swaps",
        *(account_words(summary.account) if summary.account is not None else []),
    ]
    if summary.slo:
        parts.append("slo " + ", ".join(f"{level} {objective}" for objective, level in summary.slo.items()))
    return ", ".join(parts)


def problem_table(evaluations: Sequence[Evaluation]) -> Table | None:
    """The same held-out problems at the first and at the last evaluation; None unless there are two evaluations with problems."""
    told = [evaluation for evaluation in evaluations if evaluation.problems]
    if len(told) < 2:
        return None
    first, last = told[0], told[-1]
    after = {problem.prompt: problem for problem in last.problems}
    both = [(problem, after[problem.prompt]) for problem in first.problems if problem.prompt in after][:_NUM_PROBLEMS]
    from rich.table import Table

    table = Table(title="held-out problems", title_justify="left")
    table.add_column("problem")
    table.add_column("expected")
    for one in (first, last):
        table.add_column(f"version {one.version}{by_text(one.answered_by)}")
    for before, now in both:
        table.add_row(_cell(before.prompt), _cell(before.expected), _answer(before), _answer(now))
    return table


def _answer(problem: Problem) -> Text:
    from rich.text import Text

    reward = problem.reward
    if reward is None:
        reward = float(problem.got.strip() == problem.expected.strip())
    verdict, style = {1.0: ("right", "green"), 0.0: ("wrong", "red")}.get(reward, (f"reward {reward:g}", ""))
    return Text.assemble(_cell(problem.got), " ", (verdict, style))


def _cell(text: str) -> Text:
    from rich.text import Text

    line = " ".join(text.split())
    return Text(line if len(line) <= _MAX_CELL else line[: _MAX_CELL - 3] + "...")
