"""One contender in one round, in a process of its own: `python -m benchmarks.trainer.contender CONTENDER ROUND SPEC MODEL_DIR PARENT`.

Its records are lines of its standard output; all that libraries say goes to standard error. It ends with the process
PARENT. CONTENDER `model` writes the model instead.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from benchmarks.raw import Fact, Record, Round
from benchmarks.shapes import parameters, shape_of, write_model
from benchmarks.trainer.batch import at_step, make_batch
from benchmarks.trainer.parts import Stopwatch
from benchmarks.trainer.spec import MODEL, Contender, TrainerSpec, about_cell, cell_name, our_config
from streamrl.core.batches import TrainBatch
from streamrl.runtime.service import die_with_parent
from streamrl.tensors.building import BUILDING
from streamrl.trainers.device import training_device
from streamrl.trainers.flops import ModelFlops, model_flops, peak_flops


class Ran(msgspec.Struct, frozen=True):
    """What a step did, beside training."""

    positions: int
    """Of the rows that the model was run on, padding included; 0 where nobody has counted."""


class Stepper(Protocol):
    """Somebody who trains on batches."""

    def start(self, batch: TrainBatch) -> None:
        """Get ready for steps on batches of these lengths."""
        ...

    def step(self, batch: TrainBatch) -> Ran:
        """One training step, to its end on the device."""
        ...

    def parts(self) -> AbstractContextManager[None]:
        """While entered, steps tell the stopwatch of their parts."""
        ...

    def settings(self) -> dict[str, Any]:
        """What it chose for the batches of the last `start`."""
        ...


def main() -> None:
    """The contender's process."""
    name, number, text, model_dir, parent = sys.argv[1:]
    die_with_parent(int(parent))
    records = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    spec = msgspec.json.decode(text, type=TrainerSpec)
    if name == MODEL:
        build_model(spec, Path(model_dir))
        return
    encoder = msgspec.json.Encoder()
    for record in contend(Contender(name), int(number), spec, Path(model_dir)):
        records.write(encoder.encode(record) + b"\n")


def build_model(spec: TrainerSpec, directory: Path) -> None:
    """Random weights of the shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = shape_of(spec.shape)
    write_model(shape, directory)
    with BUILDING, torch.random.fork_rng(), training_device(our_config(spec).trainer):
        torch.manual_seed(spec.seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=getattr(torch, shape.dtype))
    model.save_pretrained(directory)


def contend(contender: Contender, number: int, spec: TrainerSpec, model_dir: Path) -> Iterator[Record]:
    """All cells of a round. A cell that fails ends it, with a fact that says why."""
    torch.set_num_threads(spec.threads)
    device = training_device(our_config(spec).trainer)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    yield Fact("device", name, peak_flops(name, spec.dtype))
    watch, mean = Stopwatch(device), spec.answers[0]
    try:
        with _opened(contender, spec, model_dir, device, watch) as stepper:
            for mean in spec.answers:
                yield from _cell(stepper, contender, number, spec, mean, device, watch)
    except Exception as error:  # whatever a contender raises is the answer to whether it runs here
        yield Fact("left out", about_cell(contender, cell_name(spec.shape, mean)), f"{type(error).__name__}: {error}".splitlines()[0][:300])


@contextmanager
def _opened(contender: Contender, spec: TrainerSpec, model_dir: Path, device: torch.device, watch: Stopwatch) -> Generator[Stepper]:
    if contender == Contender.OURS:
        from benchmarks.trainer.ours import open_ours

        with open_ours(spec, model_dir, device, watch) as ours:
            yield ours
    elif contender == Contender.PLAIN:
        from benchmarks.trainer.plain import PlainLoop

        yield PlainLoop(spec, model_dir, device, watch)
    else:
        from benchmarks.trainer.trl_loss import TrlLoss

        yield TrlLoss(spec, model_dir, device, watch)


def _cell(
    stepper: Stepper, contender: Contender, number: int, spec: TrainerSpec, mean: int, device: torch.device, watch: Stopwatch
) -> Iterator[Record]:
    """One step that is not measured, those that are, and one by parts."""
    batch, cell = make_batch(spec, mean), cell_name(spec.shape, mean)
    trained = int(batch.loss_mask.sum())
    multiplies = flops_of_shape(spec, shape_config(spec))
    work = multiplies.step(batch.lengths, trained)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    stepper.start(batch)
    began = time.perf_counter()
    stepper.step(at_step(batch, 0))
    first_s = time.perf_counter() - began
    for step in range(spec.steps):
        began = time.perf_counter()
        ran = stepper.step(at_step(batch, 1 + step))
        values = {
            "step_s": time.perf_counter() - began,
            "samples": batch.num_samples,
            "tokens": batch.num_tokens,
            "trained": trained,
            "flops": work,
            "head_flops": 6 * multiplies.head * trained,
            "positions": ran.positions,
            "ranks": spec.ranks if contender == Contender.OURS else 1,
            "peak_bytes": _peak_bytes(device),
            "first_s": first_s,
            "load": os.getloadavg()[0],
        }
        yield Round(cell=cell, contender=contender, round=number * spec.steps + step, values=values)
    with stepper.parts(), watch.running() as seconds:
        stepper.step(at_step(batch, 1 + spec.steps))
    yield Fact("parts", about_cell(contender, cell), seconds)
    yield Fact("settings", about_cell(contender, cell), stepper.settings())


def flops_of_shape(spec: TrainerSpec, config: Any) -> ModelFlops:
    """What the shape multiplies; `config` as transformers has it."""
    shape = shape_of(spec.shape)
    body = [
        (name, torch.Size(size).numel()) for name, size in parameters(shape) if name not in ("model.embed_tokens.weight", "lm_head.weight")
    ]
    found = model_flops(config, body, shape.vocab * shape.hidden)
    assert found is not None  # every layer sees all, and the experts are counted
    return found


def shape_config(spec: TrainerSpec) -> Any:
    """The shape's configuration."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    from benchmarks.shapes import model_config

    shape = shape_of(spec.shape)
    values = {name: value for name, value in model_config(shape).items() if name != "torch_dtype"}
    return Qwen3MoeConfig(**values) if shape.experts else Qwen3Config(**values)


def _peak_bytes(device: torch.device) -> int:
    """Of the device's memory in this cell; on a CPU of this process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
