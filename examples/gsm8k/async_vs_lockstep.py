"""Run one configuration twice on the same machine, asynchronous and in lockstep, for equally many samples, and compare.

Usage: python examples/gsm8k/async_vs_lockstep.py [TOML] [--dir runs] [--set SECTION.KEY=VALUE ...] [--lockstep SECTION.KEY=VALUE ...]
           [--skip N] [--out FILE.md] [--read]

The second run has tasks.max_staleness = 0, and what --lockstep says. Without TOML it is tail_local.toml, which needs no GPU; tail.toml has
SGLang on one GPU and the trainer on another. Both runs are `streamrl up` with all their processes. With --read nothing is run: the two
runs are there, as far as they came.

Rates are those of the steady part: all batches behind the first N of each run (default: max_staleness + 4, at most a third). Before that
the asynchronous run has trained its short rollouts and not yet its long ones; from there on all rollouts granted with a batch must have
been trained, so both runs train the same mixture of lengths, which `tokens of a rollout` shows.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from measured import Totals, read_run, totals
from report import cell, write_report

from streamrl.runtime.rundir import RunDir

ROWS = {
    "until an engine serves, s (not counted)": "startup_s",
    "batches before the steady part (not counted)": "ramp_batches",
    "and their seconds": "ramp_s",
    "batches": "batches",
    "rollouts": "samples",
    "tokens of a rollout, mean": "response_mean",
    "seconds": "seconds",
    "batches/s": "batches_per_s",
    "rollouts/s": "samples_per_s",
    "rollouts/s in the first half": "first_half",
    "rollouts/s in the second half": "second_half",
    "tokens/s trained (without prompts)": "responses_per_s",
    "tokens/s sampled by the engine": "made_per_s",
    "tokens/s trained (with prompts)": "trained_per_s",
    "requests decoded at a time": "engine_running",
    "trainer busy": "trainer_busy",
    "trainer waits for a batch": "trainer_waits",
    "age of trained tokens, mean": "staleness_mean",
    "age of trained tokens, max": "staleness_max",
    "rollouts dropped": "dropped",
    "swaps": "swaps",
    "publication to commit p50, ms": "lag_ms_p50",
    "log-prob difference under the same weights: mean": "rounding_mean",
    "the same: p99": "rounding_p99",
    "the same: max": "rounding_max",
    "versions where it is more than rounding": "unexplained",
}
"""Row of the table to field of Totals."""


def compare(runs: dict[str, Totals]) -> str:
    """The table; a ratio where it says which is faster."""
    first, second = runs.values()
    lines = [f"| | {' | '.join(runs)} | ratio |", "|---|" + "---|" * 3]
    for label, field in ROWS.items():
        one, two = getattr(first, field), getattr(second, field)
        ratio = f"{one / two:.2f}" if "/s" in label and two else ""
        lines.append(f"| {label} | {cell(one)} | {cell(two)} | {ratio} |")
    return "\n".join(lines) + "\n"


def up(toml: Path, name: str, directory: str, overrides: list[str]) -> None:
    sets = [word for text in (f"run.dir={directory}", *overrides) for word in ("--set", text)]
    process = subprocess.Popen([sys.executable, "-m", "streamrl", "up", str(toml), "--plain", "--name", name, *sets])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        # The run drains; what it has trained is kept.
        process.send_signal(signal.SIGINT)
        process.wait()
        raise
    if code != 0:
        sys.exit(f"{name} ended with exit code {code}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toml", nargs="?", type=Path, default=Path(__file__).parent / "tail_local.toml")
    parser.add_argument("--dir", default="runs")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--lockstep", action="append", default=[])
    parser.add_argument("--skip", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--read", action="store_true")
    arguments = parser.parse_args()
    stem = arguments.toml.stem.replace("_", "-")
    names = {"async": f"{stem}-async", "lockstep": f"{stem}-lockstep"}
    if not arguments.read:
        up(arguments.toml, names["async"], arguments.dir, arguments.overrides)
        up(arguments.toml, names["lockstep"], arguments.dir, [*arguments.overrides, "tasks.max_staleness=0", *arguments.lockstep])
    read = {label: read_run(name, base=arguments.dir) for label, name in names.items()}
    trained = min(len(run.learned) for run in read.values())
    staleness = RunDir.find(names["async"], base=arguments.dir).load_config().tasks.max_staleness
    skip = min(staleness + 4, trained // 3) if arguments.skip is None else min(arguments.skip, trained - 1)
    table = compare({label: totals(run, skip=skip) for label, run in read.items()})
    for name in names.values():
        write_report(name, base=arguments.dir)
    print(table, end="")
    if arguments.out is not None:
        arguments.out.write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
