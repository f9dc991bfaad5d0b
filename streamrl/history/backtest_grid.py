"""`replay --policy-only`: the grid of bounds and policies that is back-tested, and its table."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from streamrl.config.load import override, override_keys
from streamrl.core.fold_config import fold_config
from streamrl.core.state import FoldConfig
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import ConfigError
from streamrl.history.backtest import Outcome, backtest, check_supported
from streamrl.history.backtest_model import read_history
from streamrl.history.replay_log import read_past
from streamrl.history.source import Source
from streamrl.schemas.subjects import Subjects

KEYS = ("tasks.max_staleness", "tasks.stale", "tasks.batch_tasks", "tasks.expire_versions", "tasks.drop_zero_variance")
BOUNDS = (1, 2, 4, 8)
POLICIES = ("drop", "mask", "wait")


class BacktestReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded, and what each bound and policy would have come to."""

    run: str
    recorded: Outcome
    """The run's own bound and policy, simulated; compare it with `recorded_staleness_mean` to see how good the model is."""
    recorded_staleness_mean: float
    """Mean age of the trained groups by the run's ledger."""
    recorded_wait_s: float
    """Time in which the run's trainer waited for a batch, by its ledger."""
    outcomes: tuple[Outcome, ...]


async def backtest_grid(source: Source, overrides: Sequence[str]) -> BacktestReport:
    """Simulate every combination of the values given (`tasks.max_staleness=1,2,4`); without any, of the usual bounds and policies.

    Raises:
        ConfigError: another key than those of `KEYS`, or a value that it cannot have; or the run's engines lagged on purpose.
        TrainingError: the run has trained nothing.
    """
    num_tokens = vocab_size(source.model_dir)
    configs = _grid(source, overrides, num_tokens)
    own = fold_config(source.config, num_tokens)
    check_supported(own)
    past = await read_past(source.log, Subjects(source.config.run.name), source.config.trainer.name)
    history = await read_history(source.log, past, own)
    entries = past.between(0, None)
    learned = [age for entry in entries if entry.source != "warmup" for age in entry.staleness]

    def simulate() -> tuple[Outcome, tuple[Outcome, ...]]:
        return backtest(history, own), tuple(backtest(history, config) for config in configs)

    recorded, outcomes = await asyncio.to_thread(simulate)
    return BacktestReport(
        run=source.config.run.name,
        recorded=recorded,
        recorded_staleness_mean=sum(learned) / len(learned) if learned else 0.0,
        recorded_wait_s=sum(entry.metrics.get("perf/wait_s", 0.0) for entry in entries),
        outcomes=outcomes,
    )


def print_backtest(report: BacktestReport) -> None:
    """The table, to stdout."""
    table = Table(box=None, padding=(0, 1))
    titles = ("bound", "policy", "batches", "age", "p50", "max", "stale", "waste", "wait", "time")
    for title in titles:
        table.add_column(title, justify="right")
    recorded = [("the run's", report.recorded)]
    for label, one in [*recorded, *((str(one.max_staleness), one) for one in report.outcomes)]:
        ages = (f"{one.staleness_mean:.2f}", f"{one.staleness_p50:g}", str(one.staleness_max))
        shares = (f"{one.waste:.1%}", f"{one.wait:.1%}", f"{one.total_s:.1f} s")
        table.add_row(label, one.stale, str(one.batches), *ages, str(one.stale_rollouts), *shares)
    Console().print(table)
    waited = f"the trainer waited {report.recorded_wait_s:.1f} s"
    print(f"the ledger of {report.run}: staleness mean {report.recorded_staleness_mean:.2f}, {waited}")


def _grid(source: Source, overrides: Sequence[str], num_tokens: int) -> list[FoldConfig]:
    for key in override_keys(overrides):
        if key not in KEYS:
            raise ConfigError(
                f"{key} has no part in a back-test", hint=f"it takes {', '.join(KEYS)}, each with one or more values", key=key
            )
    values = {key: text.partition("=")[2].split(",") for key, text in zip(override_keys(overrides), overrides, strict=True)}
    if "tasks.max_staleness" not in values:
        values["tasks.max_staleness"] = [str(bound) for bound in sorted({source.config.tasks.max_staleness, *BOUNDS})]
    if "tasks.stale" not in values:
        values["tasks.stale"] = list(POLICIES)
    combinations = itertools.product(*([f"{key}={value.strip()}" for value in many] for key, many in values.items()))
    return [fold_config(override(source.config, chosen), num_tokens) for chosen in combinations]
