"""A plain loop, to put the product's trainer beside: packed rows of one length, each layer compiled, a compiled head, AdamW; one rank.

It has what speed needs and nothing else: no stream, no checks, no metrics, no digests. Letters: `L` positions of a row, `M` trained tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.shapes import shape_of
from benchmarks.trainer.contender import Ran
from benchmarks.trainer.parts import Stopwatch
from benchmarks.trainer.spec import LEARNING_RATE, TrainerSpec, layers_kept, row_length
from streamrl.core.batches import TrainBatch
from streamrl.tensors.building import BUILDING

_ATTENTION = "plain_packed"
_HEAD_TOKENS = 4096
"""Trained tokens whose logits are in memory at once, at most."""


class _Foreach(NamedTuple):
    """In place on all tensors of a list, in a few kernels; what optimizers of torch are made of."""

    add: Callable[..., None] = torch._foreach_add_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    copy: Callable[..., None] = torch._foreach_copy_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    zero: Callable[..., None] = torch._foreach_zero_  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]


_FOREACH = _Foreach()


class Row(NamedTuple):
    """One forward and backward pass; all of a batch have the same shapes but `target`."""

    ids: Tensor
    """[1, L]; 0 behind the samples."""
    positions: Tensor
    """[1, L] within each sample."""
    starts: Tensor
    """[S] int32 cumulative lengths: 0, the samples' ends, then L again and again; what is behind the samples is one more."""
    target: Tensor
    """[M] columns of the trained tokens."""
    advantages: Tensor
    """[M] float32."""
    sampler: Tensor
    """[M] float32 log-probs."""


class PlainLoop:
    """Implements `Stepper`."""

    def __init__(self, spec: TrainerSpec, model_dir: Path, device: torch.device, watch: Stopwatch) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        self._shape = shape_of(spec.shape)
        self._asked = spec.kept_layers
        self._device = device
        self._watch = watch
        self._compiled = spec.compiled == "on" or (spec.compiled == "auto" and device.type == "cuda")
        self._free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")
        AttentionInterface.register(_ATTENTION, varlen_attention() if device.type == "cuda" else masked_attention)
        dtype = getattr(torch, self._shape.dtype)
        with BUILDING:
            self._model: Any = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=dtype, attn_implementation=_ATTENTION, experts_implementation=_experts(device)
            )
        self._model.to(device).eval()
        self._forwards: list[Callable[..., Any]] = [self._compile(layer.forward) for layer in self._model.model.layers]
        self._chunk = self._compile(chunk_logprobs)
        self._masters = [p.detach().float().clone() for p in self._model.parameters()]
        for master in self._masters:
            master.grad = torch.zeros_like(master)
        self._adam = torch.optim.AdamW(self._masters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)
        self._row = self._kept = 0

    def start(self, batch: TrainBatch) -> None:
        """Choose the rows' length and the layers that keep their activations."""
        self._row = row_length(int(batch.lengths.max()))
        kept = layers_kept(self._shape, self._row, self._free) if self._asked < 0 else min(self._asked, self._shape.layers)
        self._kept = kept
        layers = self._model.model.layers
        for index, (layer, forward) in enumerate(zip(layers, self._forwards, strict=True)):
            again = partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
            layer.forward = forward if index >= len(layers) - kept else again

    def step(self, batch: TrainBatch) -> Ran:
        """One step on the whole batch."""
        rows = make_rows(batch, self._row, self._device)
        trained = int(batch.loss_mask.sum())
        for row in rows:
            with self._watch.part("forward"):
                named = {"cu_seq_lens_q": row.starts, "max_length_q": self._row}
                states = self._model.model(input_ids=row.ids, position_ids=row.positions, use_cache=False, **named).last_hidden_state[0]
            with self._watch.part("head"):
                gradient = self._head(states.detach(), row, trained)
            with self._watch.part("backward"):
                states.backward(gradient)
                parameters = list(self._model.parameters())
                _FOREACH.add([master.grad for master in self._masters], [p.grad for p in parameters])
                for p in parameters:
                    p.grad = None
        with self._watch.part("optimizer"), torch.no_grad():
            torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
            self._adam.step()
            _FOREACH.copy(list(self._model.parameters()), self._masters)
            _FOREACH.zero([master.grad for master in self._masters])
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        return Ran(positions=len(rows) * self._row)

    def parts(self) -> AbstractContextManager[None]:
        """It always tells them."""
        return nullcontext()

    def settings(self) -> dict[str, Any]:
        """What it has chosen."""
        return {"row": self._row, "kept_layers": self._kept, "layers": self._shape.layers, "compiled": self._compiled}

    def _head(self, states: Tensor, row: Row, trained: int) -> Tensor:
        """Forward and backward pass of the head, by chunks of one size; gives the gradient of the states."""
        leaf = states.requires_grad_()
        weight, size = self._model.lm_head.weight, min(_HEAD_TOKENS, self._row)
        for first in range(0, len(row.target), size):
            own = slice(first, first + size)
            target = row.target[own]
            filled = torch.nn.functional.pad(target, (0, size - len(target)), value=1)
            found = self._chunk(leaf[filled - 1], weight, row.ids[0, filled])[: len(target)]
            (-(torch.exp(found - row.sampler[own]) * row.advantages[own]).sum() / trained).backward()
        assert leaf.grad is not None  # every row has a trained token
        return leaf.grad

    def _compile(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False) if self._compiled else function


def _experts(device: torch.device) -> str:
    """How transformers runs a mixture of experts: by its own grouped products on a GPU."""
    return "grouped_mm" if device.type == "cuda" else "eager"


def chunk_logprobs(states: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Log-probs of the targets, in float32 from products of the weight's type."""
    logits = (states @ weight.t()).float()
    return logits.gather(1, targets[:, None])[:, 0] - torch.logsumexp(logits, 1)


def make_rows(batch: TrainBatch, length: int, device: torch.device) -> list[Row]:
    """Whole samples in rows of `length` positions: longest first, each into the fullest row that still takes it."""
    bins: list[tuple[int, list[int]]] = []
    for sample in np.argsort(-batch.lengths, kind="stable").tolist():
        size = int(batch.lengths[sample])
        fitting = [index for index, (used, _) in enumerate(bins) if used + size <= length]
        if fitting:
            best = max(fitting, key=lambda index: bins[index][0])
            bins[best] = (bins[best][0] + size, [*bins[best][1], sample])
        else:
            bins.append((size, [sample]))
    most = max(len(samples) for _, samples in bins)
    advantages = group_advantages(batch)
    return [_row(batch, samples, advantages, length, 1 << (most + 1).bit_length(), device) for _, samples in bins]


def group_advantages(batch: TrainBatch) -> np.ndarray[Any, np.dtype[np.float32]]:
    """[N] rewards less their group's mean, over its standard deviation."""
    found = np.zeros(batch.num_samples, np.float32)
    for task in np.unique(batch.tasks):
        own = batch.rewards[batch.tasks == task]
        found[batch.tasks == task] = (own - own.mean()) / (own.std() + 1e-6)
    return found


def _row(
    batch: TrainBatch, samples: list[int], advantages: np.ndarray[Any, Any], length: int, num_starts: int, device: torch.device
) -> Row:
    of_samples = [np.arange(batch.offsets[n], batch.offsets[n + 1]) for n in samples]
    tokens = np.concatenate(of_samples)
    sizes = [len(own) for own in of_samples]
    ids, positions = np.zeros(length, np.int64), np.zeros(length, np.int64)
    ids[: len(tokens)] = batch.tokens[tokens]
    positions[: len(tokens)] = np.concatenate([np.arange(size) for size in sizes])
    positions[len(tokens) :] = np.arange(length - len(tokens))
    starts = np.full(num_starts, length, np.int32)
    starts[0], starts[1 : len(sizes) + 1] = 0, np.cumsum(sizes)
    target = np.flatnonzero(batch.loss_mask[tokens])
    owner = np.repeat(np.array(samples), sizes)[target]
    arrays = (ids[None], positions[None], starts, target, advantages[owner], batch.sampler_logprobs[tokens[target]])
    return Row(*(torch.from_numpy(array).to(device) for array in arrays))


def masked_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, cu_seq_lens_q: Tensor, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention within the samples of a row where there is no kernel for that. All are [1, heads, L, D]; gives [1, L, heads, D]."""
    columns = torch.arange(query.shape[2], device=query.device)
    owner = torch.searchsorted(cu_seq_lens_q, columns, right=True)
    allowed = (owner[:, None] == owner[None, :]) & (columns[:, None] >= columns[None, :])
    found = scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scaling, enable_gqa=True)
    return found.transpose(1, 2), None


def varlen_attention() -> Callable[..., tuple[Tensor, None]]:
    """The same by torch's FlashAttention for several lengths; what its versions call things is settled here, outside of compiled code."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    repeats = "enable_gqa" not in known
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if not repeats:
        options["enable_gqa"] = True

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, cu_seq_lens_q: Tensor, max_length_q: int, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v = (one.transpose(1, 2)[0] for one in (query, key, value))
        if repeats and q.shape[1] > k.shape[1]:
            k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        found: Any = varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, **options)
        return found[None], None

    return attention
