"""A run at a glance: its numbers with the sentence on them, at a moment or over all of it, and in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from msgspec.structs import replace

from streamrl.config.tree import Config
from streamrl.monitor.numbers import Account, Evaluation, Glance, RunNumbers, Verdict, WorkerLine
from streamrl.monitor.screen import short
from streamrl.monitor.series import RUN, TRAINED
from streamrl.monitor.shares import shares
from streamrl.monitor.slo import Signs
from streamrl.monitor.verdict import Evidence, Pace, verdict
from streamrl.monitor.view import REWARD_WINDOW, RunView
from streamrl.telemetry.states import STATES, seconds


def signs_of(view: RunView, numbers: RunNumbers, config: Config, *, still_s: float = 0.0) -> Signs:
    """Gather the signs of this moment; `still_s`: seconds since the newest batch."""
    newest = view.trained.newest
    return Signs(
        numbers=numbers,
        batch=newest.metrics if newest else {},
        window=view.series.window if view.series else {},
        decided=view.series.decided if view.series else {},
        stones=view.failures.all_reasons,
        still_s=still_s,
        distances=view.trained.distances.of_engines() if config.tasks.inexact != "allow" else {},
        float32=(config.trainer.dtype or config.model.dtype) == "float32",
        batch_tasks=config.tasks.batch_tasks,
        num_rollouts=config.group_size,
    )


def judged(view: RunView, config: Config, *, elapsed_s: float, supervised: Mapping[str, WorkerLine] | None = None) -> RunNumbers:
    """The numbers of this moment (`RunView.numbers`), with the sentence on them."""
    numbers = view.numbers(elapsed_s=elapsed_s, supervised=supervised)
    if view.finished:
        return with_verdict(view, numbers, verdict_over(view))
    rates = [one.tokens_per_s for one in numbers.engines if not one.pinned]
    pace = Pace(trainer=numbers.trainer_tokens_per_s, waits=numbers.trainer_waits, engines=sum(rates) if rates else None)
    return with_verdict(view, numbers, verdict(evidence_of(view), signs_of(view, numbers, config), pace))


def with_verdict(view: RunView, numbers: RunNumbers, found: Verdict) -> RunNumbers:
    """The numbers with a sentence on them, and with what its evidence says of the beginning."""
    evidence = evidence_of(view)
    first = statistics.fmean(evidence.first) if evidence.first else None
    return replace(
        numbers,
        verdict=found,
        reward_first=None if evidence.is_loss else first,
        loss_first=first if evidence.is_loss else None,
        heldout_first=evidence.evaluations[0].accuracy if evidence.evaluations else None,
    )


def verdict_over(view: RunView) -> Verdict:
    """The sentence on a run that has ended: its whole time is the window. A branch, whose time nobody reports, has no bottleneck."""
    numbers = view.numbers(elapsed_s=0.0)
    spent = view.spent.sums
    newest = view.trained.newest
    signs = Signs(
        numbers=numbers,
        batch=newest.metrics if newest else {},
        window={RUN: shares(spent)} if spent else {},
        decided={TRAINED: numbers.account.rollouts_trained, **numbers.drops},
    )
    work_s = sum(spent.get(seconds("trainer", state), 0.0) for state in STATES["trainer"] if state != "setup")
    pace = Pace(
        trainer=numbers.trainer_tokens_per_s,
        waits=spent.get(seconds("trainer", "wait_samples"), 0.0) / work_s if work_s > 0 else None,
        engines=view.tokens_made / work_s if work_s > 0 else None,
    )
    return verdict(evidence_of(view), signs, pace, over=True)


def evidence_of(view: RunView) -> Evidence:
    """Gather the evidence: rewards or losses of the first and the last batches, as the summary compares them, and the evaluations."""
    trained, points = view.trained, view.reward_points
    count = ends(trained.num_reinforced)
    losses = [point.loss for point in points if point.loss is not None]
    if losses:
        width = ends(len(losses))
        first, last = losses[:width], losses[-width:]
    else:
        first, last = trained.first_rewards(count), trained.last_rewards(count)
    return Evidence(
        num_batches=trained.num_reinforced,
        warming=trained.is_warming,
        first=first,
        last=last,
        is_loss=bool(losses),
        evaluations=learning(view, view.evaluations),
    )


def ends(count: int) -> int:
    """Number of batches of `count` that are compared at the beginning and at the end: none is on both sides, unless it is the only one."""
    return max(1, min(REWARD_WINDOW, count // 2))


def learning(view: RunView, ordered: list[Evaluation]) -> list[Evaluation]:
    """Evaluations of a set from the end of the warm-up on, by version, the newest of each; all of them if there are none after it."""
    return [one for one in ordered if one.version.number > view.trained.last_cold] or ordered


def glance_of(numbers: RunNumbers) -> Glance:
    """The numbers of a run that people look at first."""
    return Glance(
        verdict=numbers.verdict,
        account=numbers.account,
        version="" if numbers.version == "-" else numbers.version,
        reward=numbers.reward,
        reward_first=numbers.reward_first,
        loss=numbers.loss,
        loss_first=numbers.loss_first,
        heldout=numbers.heldout,
        heldout_first=numbers.heldout_first,
        heldout_set=numbers.heldout_set,
        heldout_interval=numbers.heldout_interval,
        steps_per_minute=numbers.steps_per_minute,
        left_s=numbers.left_s,
    )


def account_words(account: Account) -> list[str]:
    """The account in words: rollouts, time of trainer and engines, and what was trained in it; nothing of what is not known."""
    found: list[str] = []
    if account.trained_share is not None:
        found.append(f"{account.trained_share:.0%} of {short(account.rollouts_ended)} rollouts trained")
    if account.gpu_s > 0:
        of = {"trainer": (account.trainer_gpu_s, account.trainer_s), "engines": (account.engine_gpu_s, account.engine_s)}
        parts = [_time(name, gpu_s, up_s) for name, (gpu_s, up_s) in of.items() if up_s > 0]
        found.append(", ".join(parts) + (" of the same GPUs" if account.shared else ""))
    elif account.trainer_s + account.engine_s > 0:
        parts = [f"{name} {short(up_s)}" for name, up_s in (("trainer", account.trainer_s), ("engines", account.engine_s)) if up_s > 0]
        found.append(f"worker-seconds on the CPU: {', '.join(parts)}")
    if account.tokens_per_gpu_s is not None:
        found.append(f"{short(account.tokens_per_gpu_s)} tokens trained a GPU-second")
    elif account.tokens_per_worker_s is not None:
        found.append(f"{short(account.tokens_per_worker_s)} tokens trained a worker-second")
    return found


def _time(name: str, gpu_s: float, up_s: float) -> str:
    return f"{name} {short(gpu_s)} GPU-seconds" if gpu_s > 0 else f"{name} {short(up_s)} worker-seconds on the CPU"
