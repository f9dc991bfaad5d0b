"""Mean age and utilisation of whole runs with and without pacing; `python -m tests.staleness.measure_real` prints the table."""

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.config.tree import DebugConfig, TasksConfig
from streamrl.consumers.training import worker as trainer_module
from streamrl.data.model import ensure_model
from tests.staleness.conftest import table_config
from tests.staleness.slow import SlowTrainer
from tests.support.harness import make_run, read_ledger, run_to_end

STEPS, SETTLED, STEP_S = 45, 15, 0.25
DELAY = DebugConfig(token_delay_s=0.04, token_delay_sigma=0.8)


async def measure(folder: Path, server: NatsServer, *, hold: bool, staleness: int, stale: str) -> str:
    """One run of its own; returns `mean age, dropped, busy` of the batches after the first `SETTLED`."""
    tasks = TasksConfig(batch_tasks=8, num_rollouts=2, max_staleness=staleness, stale=stale, hold_ahead=hold, drop_zero_variance=False)  # type: ignore[arg-type]
    name = f"s{staleness}-{stale}-{'hold' if hold else 'full'}"
    folder = folder / name
    folder.mkdir()
    config = table_config(folder, name, steps=STEPS, tasks=tasks, debug=DELAY)
    config = replace(config, weights=replace(config.weights, keep=4), bus=replace(config.bus, samples_bytes=10**8, blobs_bytes=10**8))
    run, config = make_run(folder, config)
    bus = await connect(server.address, name, config.bus)
    try:
        ensure_model(config, run.model_dir)
        await run_to_end(config, run, bus)
        ledger = (await read_ledger(bus, name))[SETTLED:]
    finally:
        await bus.close()
    ages = [age for entry in ledger for age in entry.staleness]
    dropped = sum(drop.reason == "stale" for entry in ledger for drop in entry.drops)
    step, wait = (sum(entry.metrics[f"perf/{what}_s"] for entry in ledger) for what in ("step", "wait"))
    return f"{statistics.fmean(ages):.2f}, {dropped}, {step / (step + wait):.2f}"


async def main() -> None:
    """Print the table."""
    made = trainer_module.make_trainer
    trainer_module.make_trainer = lambda *given, **named: SlowTrainer(made(*given, **named), lambda number: STEP_S)  # type: ignore[assignment]
    sys.stdout.write("| policy | S | full credits: mean age, dropped, busy | hold_ahead: mean age, dropped, busy |\n|---|---|---|---|\n")
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder) / "nats")
        server.start()
        try:
            for stale, staleness in (("drop", 4), ("drop", 8), ("wait", 8)):
                cells = [await measure(Path(folder), server, hold=hold, staleness=staleness, stale=stale) for hold in (False, True)]
                sys.stdout.write(f"| {stale} | {staleness} | {cells[0]} | {cells[1]} |\n")
                sys.stdout.flush()
        finally:
            server.stop()


if __name__ == "__main__":
    asyncio.run(main())
