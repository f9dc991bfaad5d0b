"""`bench trainer`: every contender trains on the same batches in turn, each time in a process of its own."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from benchmarks.processes import child
from benchmarks.raw import Fact, Record, Round, header, write_measured
from benchmarks.report import turn
from benchmarks.trainer.spec import MODEL, TrainerSpec, about_cell, cell_name, our_config, resolved
from streamrl.errors import ConfigError, LaunchError
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
    directory = _with_model(spec, directory)
    left = {who: {about_cell(who, cell_name(spec.shape, mean)): mean for mean in spec.answers} for who in spec.contenders}
    untried = {about: who for who, cells in left.items() for about in cells}
    failed: dict[str, str] = {}
    for number in range(spec.rounds):
        for contender in turn(spec.contenders, number):
            if not left[contender]:
                continue
            for record in ran(contender, number, msgspec.structs.replace(spec, answers=tuple(left[contender].values())), directory):
                if isinstance(record, Round):
                    untried.pop(about_cell(contender, record.cell), None)
                    logger.info("event=measured contender=%s cell=%s seconds=%.2f", contender, record.cell, record.values["step_s"])
                elif record.name == "left out":
                    logger.warning("event=left_out what=%s why=%s", record.about, record.value)
                    # What failed is not asked for again; what stood behind it is, in the next round.
                    del left[contender][record.about]
                    untried.pop(record.about, None)
                    failed[contender] = record.about
                yield record
    for about, contender in untried.items():
        yield Fact("left out", about, f"not tried, because {failed[contender]} failed before it")


def _with_model(spec: TrainerSpec, scratch: Path) -> Path:
    """A directory with the model; raises ConfigError where the one that was kept is another, and LaunchError where none can be made."""
    directory = Path(spec.model_dir).absolute() if spec.model_dir else scratch
    made, wanted = directory / "made", f"{spec.shape} {spec.seed}"
    if made.exists():
        if (got := made.read_text()) != wanted:
            raise ConfigError(f"--model: expected {wanted} in {directory}, got {got}", hint="choose another directory", got=got)
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    for record in ran(MODEL, 0, spec, directory):
        raise LaunchError(f"expected a model, got {record}")
    made.write_text(wanted)
    return directory


def ran(name: str, number: int, spec: TrainerSpec, directory: Path) -> Iterator[Record]:
    """The records of one process, as they come; where one dies without a word, the cell that it was at is left out with its exit code.

    Args:
        name: a contender; `MODEL`: the model is written, and there are no records.
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
    left = [about_cell(name, cell_name(spec.shape, mean)) for mean in spec.answers]
    with subprocess.Popen(**command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                record = decoder.decode(line)
                if isinstance(record, Fact):
                    said = said or record.name == "left out"
                    if record.name == "settings":  # a cell's last record
                        left.remove(record.about)
                yield record
        except BaseException:
            process.kill()
            raise
    if process.returncode == 0 or said:
        return
    if name == MODEL:
        raise LaunchError(
            f"the process that makes the model: expected exit code 0, got {process.returncode}", hint="its error stands above"
        )
    for about in left[:1]:
        yield Fact("left out", about, f"its process ended with exit code {process.returncode}")
