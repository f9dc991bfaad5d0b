"""`bench trainer`: every contender trains on the same batches in turn, each time in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from benchmarks.processes import child
from benchmarks.raw import Fact, Record, Round, header, write_measured
from benchmarks.report import turn
from benchmarks.trainer.spec import TrainerSpec, cell_name, our_config, resolved
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import environment

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "numpy", "trl")


def measure(spec: TrainerSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`; what was measured until an error is there.

    Raises:
        ConfigError: `out` holds another run, or the product refuses the configuration.
        LaunchError: the model could not be made.
    """
    spec = resolved(spec)
    our_config(spec)
    write_measured(out, header("trainer", command, spec, PACKAGES), lambda scratch: _records(spec, scratch))


def _records(spec: TrainerSpec, directory: Path) -> Iterator[Record]:
    for record in ran("model", 0, spec, directory):
        raise LaunchError(f"expected a model, got {record}")
    left = {contender: list(spec.answers) for contender in spec.contenders}
    for number in range(spec.rounds):
        for contender in turn(spec.contenders, number):
            if not left[contender]:
                continue
            done: set[str] = set()
            for record in ran(contender, number, msgspec.structs.replace(spec, answers=tuple(left[contender])), directory):
                if isinstance(record, Round):
                    done.add(record.cell)
                    logger.info("event=measured contender=%s cell=%s seconds=%.2f", contender, record.cell, record.values["step_s"])
                elif record.name == "left out":
                    logger.warning("event=left_out what=%s why=%s", record.about, record.value)
                yield record
            # What failed is not asked for again; nor is anything, where not even the first could be begun.
            failed = next((mean for mean in left[contender] if cell_name(spec, mean) not in done), None)
            left[contender] = [mean for mean in left[contender] if mean != failed]


def ran(name: str, number: int, spec: TrainerSpec, directory: Path) -> Iterator[Record]:
    """The records of one process, as they come; one that dies without a word is left out with its exit code.

    Args:
        name: a contender; `model`: the model is written, and there are no records.
        number: of the round.
        spec: what it trains on.
        directory: the model is in it.

    Raises:
        LaunchError: the model could not be made.
    """
    text = msgspec.json.encode(spec).decode()
    env = environment(our_config(spec), "trainer")
    command = child("benchmarks.trainer.contender", name, number, text, directory / "model", os.getpid(), env=env)
    decoder = msgspec.json.Decoder(Record)
    said = False
    with subprocess.Popen(**command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                record = decoder.decode(line)
                said = said or (isinstance(record, Fact) and record.name == "left out")
                yield record
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0 or said:
        return
    if name == "model":
        raise LaunchError(
            f"the process that makes the model: expected exit code 0, got {process.returncode}", hint="its error stands above"
        )
    yield Fact("left out", f"{name} ({_cells(spec, spec.answers)})", f"its process ended with exit code {process.returncode}")


def _cells(spec: TrainerSpec, answers: Sequence[int]) -> str:
    return "; ".join(cell_name(spec, mean) for mean in answers)
