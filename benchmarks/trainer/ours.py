"""The product's trainer as a contender: made from its configuration as `up` makes it, with all of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.trainer.contender import Ran
from benchmarks.trainer.parts import Stopwatch, timed
from benchmarks.trainer.spec import TrainerSpec, our_config
from streamrl.algorithms.chunked_head import ChunkedHead
from streamrl.algorithms.fused_head import FusedHead
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import MicroBatch
from streamrl.errors import TrainingError
from streamrl.schemas.ledger import Choices
from streamrl.trainers.fingerprint import numerics_fingerprint
from streamrl.trainers.megatron.model import MegatronLM
from streamrl.trainers.megatron.ranks import MegatronParallel
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.ranks.local import open_trainer
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.optimizer import ClippedAdamW
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.trainer import TorchTrainer

_PARTS: dict[tuple[type, str], str] = {
    (CausalLM, "predict"): "head",
    (CausalLM, "states"): "forward",
    (MegatronLM, "predict"): "head",
    (MegatronLM, "states"): "forward",
    (torch.Tensor, "backward"): "backward",
    (ChunkedHead, "backward"): "head",
    (FusedHead, "backward"): "head",
    (Parallel, "sum_gradients"): "ranks",
    (MegatronParallel, "sum_gradients"): "ranks",
    (ClippedAdamW, "step"): "optimizer",
    (TorchTrainer, "digest"): "digest",
}
"""A part within another takes its time from that: the head's backward pass from `backward`."""
_TOLD = (
    *("attention", "backend", "compile", "compiled", "context", "dtype", "experts", "gather", "megatron", "micro_tokens", "numerics"),
    *("ranks", "shards", "tensor"),
)
"""What of the fingerprint is told, as far as this version has it."""


class Ours:
    """One trainer; implements `Stepper`."""

    def __init__(self, trainer: Trainer, spec: TrainerSpec, watch: Stopwatch) -> None:
        self._trainer = trainer
        self._watch = watch
        self._ranks = spec.ranks
        self._config = our_config(spec)
        self._micro_tokens = 0
        self._choices: Choices | None = None
        self._positions = 0

    def start(self, batch: TrainBatch) -> None:
        """It is ready for any batch."""

    def step(self, batch: TrainBatch) -> Ran:
        """One step of all ranks."""
        self._positions = 0
        result = self._trainer.step(batch)
        self._micro_tokens, self._choices = result.micro_tokens, result.choices
        if not result.finite:
            raise TrainingError("expected a step that trains, got one whose gradient is not finite", hint="is the shape's type float32?")
        return Ran(positions=self._positions if self._ranks == 1 else 0)

    def parts(self) -> AbstractContextManager[None]:
        """While entered, the stopwatch is told of parts."""
        return timed(self._watch, _PARTS)

    def settings(self) -> dict[str, Any]:
        """What it has chosen."""
        told = {name: value for name, value in numerics_fingerprint(self._config).items() if name in _TOLD}
        chosen = self._choices or Choices()
        kept = "all" if chosen.kept_layers is None else chosen.kept_layers
        return {**told, "micro_tokens": self._micro_tokens, "row": chosen.row_length, "kept_layers": kept}

    @contextmanager
    def counting(self) -> Generator[None]:
        """While entered, positions of the rows that the model is run on are counted."""
        with ExitStack() as stack:
            for kind in (CausalLM, MegatronLM):
                stack.enter_context(mock.patch.object(kind, "states", self._counted(kind.states)))
            yield

    def _counted(self, states: Callable[[Any, MicroBatch], torch.Tensor]) -> Callable[[Any, MicroBatch], torch.Tensor]:
        def counted(model: Any, micro: MicroBatch) -> torch.Tensor:
            self._positions += micro.inputs.size
            return states(model, micro)

        return counted


@contextmanager
def open_ours(spec: TrainerSpec, model_dir: Path, device: torch.device, watch: Stopwatch) -> Generator[Ours]:
    """The trainer and the processes of its other ranks; raises StreamRLError."""
    with open_trainer(our_config(spec), model_dir) as trainer:
        ours = Ours(trainer, spec, watch)
        with ours.counting():
            yield ours
