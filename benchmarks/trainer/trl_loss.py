"""TRL's GRPO loss as a contender, where trl is installed: forward and backward pass and optimizer's step on prepared inputs, one rank.

Nothing is generated and nothing scored. Model, precision, checkpointing and optimizer are TRL's defaults for its GRPOConfig.
"""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.shapes import shape_of
from benchmarks.trainer.contender import Ran
from benchmarks.trainer.parts import Stopwatch
from benchmarks.trainer.plain import group_advantages
from benchmarks.trainer.spec import LEARNING_RATE, TrainerSpec, longest_sample
from streamrl.core.batches import TrainBatch

_MICRO_TOKENS = 16_384
"""Positions of a rectangle; one sample that is longer has its own."""


class TrlLoss:
    """Implements `Stepper`; raises ImportError where trl, or what it needs, is not installed."""

    def __init__(self, spec: TrainerSpec, model_dir: Path, device: torch.device, watch: Stopwatch) -> None:
        from datasets import Dataset  # pyright: ignore[reportMissingImports]
        from trl.trainer.grpo_config import GRPOConfig
        from trl.trainer.grpo_trainer import GRPOTrainer

        cuda = device.type == "cuda"
        longest = max(longest_sample(spec, mean) for mean in spec.answers)
        self._watch = watch
        self._device = device
        self._bf16 = cuda and shape_of(spec.shape).dtype == "bfloat16"
        config = GRPOConfig(
            output_dir=tempfile.gettempdir(),  # nothing is written
            report_to="none",
            learning_rate=LEARNING_RATE,
            use_cpu=not cuda,
            bf16=self._bf16,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=spec.rollouts,
            num_generations=max(2, spec.rollouts),
            max_completion_length=longest - spec.prompt_tokens,
            seed=spec.seed,
        )
        self._trainer: Any = GRPOTrainer(
            model=str(model_dir),
            reward_funcs=_no_reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "none"}]),
            processing_class=_tokenizer(),
        )
        accelerator, optimizer = self._trainer.accelerator, self._trainer.create_optimizer()
        self._model, self._optimizer = accelerator.prepare(self._trainer.model.train(), optimizer)

    def start(self, batch: TrainBatch) -> None:
        """It is ready for any batch."""

    def step(self, batch: TrainBatch) -> Ran:
        """One step on the whole batch, rectangle by rectangle."""
        rectangles = make_rectangles(batch, self._device)
        self._trainer.current_gradient_accumulation_steps = len(rectangles)
        positions = 0
        for inputs in rectangles:
            positions += inputs["prompt_ids"].numel() + inputs["completion_ids"].numel()
            with self._watch.part("forward"), self._trainer.compute_loss_context_manager():
                loss = self._trainer.compute_loss(self._model, inputs)
            with self._watch.part("backward"):
                self._trainer.accelerator.backward(loss)
        with self._watch.part("optimizer"):
            self._trainer.accelerator.clip_grad_norm_(self._model.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return Ran(positions=positions)

    def parts(self) -> AbstractContextManager[None]:
        """It always tells them; the head is in `forward`."""
        return nullcontext()

    def settings(self) -> dict[str, Any]:
        """What it has chosen."""
        chosen = self._trainer.args
        dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        return {"loss": chosen.loss_type, "dtype": dtype, "bf16": self._bf16, "gradient_checkpointing": chosen.gradient_checkpointing}


def make_rectangles(batch: TrainBatch, device: torch.device) -> list[dict[str, torch.Tensor]]:
    """What TRL's loss takes: samples of like lengths, answers padded on the right, positions within a bound. Prompts are equally long."""
    advantages = group_advantages(batch)
    order = np.argsort(-batch.lengths, kind="stable").tolist()
    rectangles: list[dict[str, torch.Tensor]] = []
    while order:
        longest = int(batch.lengths[order[0]])
        count = max(1, _MICRO_TOKENS // longest)
        samples, order = order[:count], order[count:]
        rectangles.append(_rectangle(batch, samples, advantages, device))
    return rectangles


def _rectangle(batch: TrainBatch, samples: list[int], advantages: np.ndarray[Any, Any], device: torch.device) -> dict[str, torch.Tensor]:
    own = [slice(batch.offsets[n], batch.offsets[n + 1]) for n in samples]
    prompt = int(np.argmax(batch.loss_mask[own[0]]))
    width = max(one.stop - one.start for one in own) - prompt
    answers, mask = np.zeros((len(own), width), np.int64), np.zeros((len(own), width), np.int64)
    for row, one in enumerate(own):
        answer = batch.tokens[one][prompt:]
        answers[row, : len(answer)], mask[row, : len(answer)] = answer, 1
    prompts = np.stack([batch.tokens[one][:prompt] for one in own]).astype(np.int64)
    found = {
        "prompt_ids": torch.from_numpy(prompts),
        "prompt_mask": torch.ones(prompts.shape, dtype=torch.int64),
        "completion_ids": torch.from_numpy(answers),
        "completion_mask": torch.from_numpy(mask),
        "advantages": torch.from_numpy(advantages[samples]),
        "num_items_in_batch": torch.tensor(batch.loss_mask.sum()),
    }
    return {name: value.to(device) for name, value in found.items()}


def _no_reward(completions: list[Any], **_: Any) -> list[float | None]:
    return [0.0] * len(completions)


def _tokenizer() -> Any:
    """TRL wants one; no text is ever read."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1, "none": 2}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
