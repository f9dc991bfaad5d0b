"""A Hugging Face causal language model, run on micro-batches. Letters as in `streamrl.core.packing`, `H` hidden size, `V` vocabulary.

The body and the output head are called apart, so that only the states that predict a wanted token meet the head, a bounded
number of logits at a time. Whether that equals the model's own forward, and whether the model can be masked freely
(shared prefixes, several samples a row), is tried out once when it is loaded.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch._dynamo.decorators import maybe_mark_dynamic
from torch.distributed.tensor import DTensor

from streamrl.algorithms.chunked_head import chunk_kernels, chunked_logprobs
from streamrl.algorithms.divergences import Divergence
from streamrl.algorithms.logprobs import CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS, LinearHead, linear_logprobs, token_logprobs
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import MicroBatch, trial_row
from streamrl.errors import ConfigError
from streamrl.tensors.building import BUILDING
from streamrl.tensors.transfer import on_device
from streamrl.trainers.drawn import drawn, logit_bias
from streamrl.trainers.flops import flops_of, windows_of
from streamrl.trainers.torch import attention as packed_rows
from streamrl.trainers.torch import experts
from streamrl.trainers.torch.context import Context, Share
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.layers import Layers, first_line
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.routing import routers_of
from streamrl.trainers.torch.sharding import Gathered, Held, cut

logger = logging.getLogger(__name__)

# Wide enough for rounding in bfloat16, far below what a wrong mask or a missing scale does to the logits.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.15, torch.float16: 0.05}

_PLAIN = Kernels()
Result = TypeVar("Result")


class CausalLM:
    """Owns the module; dropout is off throughout, as it was when the tokens were sampled.

    Args:
        model_dir: Hugging Face model directory.
        dtype: type of the weights.
        device: where they lie.
        kernels: by which it is run; `packed` is `sdpa` where the model cannot be run on packed rows, and then nothing is compiled.

    Raises:
        ConfigError: the directory holds no causal language model, one whose head cannot be called apart or, with
            `kept_layers`, one whose layers are not as many; or FlashAttention is not installed.
    """

    def __init__(self, model_dir: Path, dtype: torch.dtype, device: torch.device, *, kernels: Kernels = _PLAIN) -> None:
        attention = kernels.attention
        self.module: Any = _load(model_dir, dtype, attention)
        self.module.to(device).eval()
        self.name, self.flops = type(self.module).__name__, flops_of(self.module)
        self.config: dict[str, Any] = self.module.config.to_dict()
        self.device = device
        self.dtype = dtype
        """That it computes in."""
        self._chunk_elements = CHUNK_ELEMENTS if device.type == "cpu" else GPU_CHUNK_ELEMENTS
        self.width: int = self.module.config.get_text_config().hidden_size
        self.vocab_size: int = self.module.get_output_embeddings().weight.shape[0]
        self.body = self.module.get_decoder()
        text = self.module.config.get_text_config()
        # Cohere multiplies its logits by logit_scale, Granite divides them by logits_scaling, Gemma caps them.
        self._scale: float = (getattr(text, "logit_scale", None) or 1.0) / (getattr(text, "logits_scaling", None) or 1.0)
        self._softcap: float = getattr(text, "final_logit_softcapping", None) or 0.0
        self._takes_positions = "position_ids" in inspect.signature(self.body.forward).parameters
        self.routers = routers_of(self.module)
        """Of a mixture of experts; none of another model."""
        self._check_head()
        windows = windows_of(text)
        self.windowed = windows is None or any(window is not None for window in windows)
        """True where some layers do not attend to all that is before a token."""
        placed = attention != "flash" and self._takes_positions
        capped = getattr(text, "attn_logit_softcapping", None)  # which `packed_attention` does not do
        self.packs = placed and attention == "packed" and windows is not None and not capped and self._packing_works(windows)
        """Whether it can be run on packed rows."""
        if attention == "packed" and not self.packs:
            logger.warning("event=rows_not_packed model=%s", self.name)
            self.module.set_attn_implementation("sdpa")
        # An explicit mask would replace or bypass sliding windows, linear attention and state-space layers.
        self.free_masks = placed and not self.windowed and not self.packs and self._masks_work()
        self._unit: Gathered | None = None
        self._context: Context | None = None
        self._layers = Layers(self._stack(), self.vocab_size)
        self.arrange(compiled=kernels.compile, kept=None if kernels.kept_layers == "auto" else kernels.kept_layers)
        if not self.free_masks and not self.packs:
            logger.info("event=one_sample_per_row model=%s", self.name)

    def cut(self, parallel: Parallel, *, trained: bool) -> Held:
        """The parameters as this rank holds them: all, or its part of them, which the model keeps alone from here on.

        Args:
            parallel: the ranks.
            trained: a gradient is computed.

        Raises:
            ConfigError: it is to be cut, and its layers are not known.
        """
        self._context = parallel.context
        types = {name: parameter.dtype for name, parameter in self.parameters()}
        if parallel.sharded:
            if not self._layers:
                raise ConfigError(
                    f"trainer.shards = {parallel.mesh.shard}, but {type(self.body).__name__} has no list of layers",
                    hint="set it to 1",
                    key="trainer.shards",
                    got=parallel.mesh.shard,
                )
            self._unit = cut(self.module, self._layers.modules, parallel, self.dtype, trained=trained)
        return Held(self.parameters(), types, parallel, self.module.config.model_type)

    def save_pretrained(self, directory: Path, parameters: Mapping[str, Tensor] | None) -> None:
        """Write weights and configuration as transformers does; the weights of a model that is cut are given."""
        if parameters is None:
            self.module.save_pretrained(directory)
            return
        rest = {name: value for name, value in self.module.state_dict().items() if not isinstance(value, DTensor)}
        self.module.save_pretrained(directory, state_dict={**rest, **parameters})

    def forget(self) -> None:
        """Let go of what was gathered: the parameters have been written."""
        if self._unit is not None:
            self._unit.forget()

    def accumulate(self, *, last: bool) -> None:
        """Before each micro-batch of an optimizer step; see `Gathered`."""
        if self._unit is not None:
            self._unit.accumulate(last=last)

    @property
    def num_layers(self) -> int:
        """Layers that can be compiled and run again; 0 where they are not known."""
        return len(self._layers)

    @property
    def gathers_once(self) -> bool:
        """See `Gathered`; False for a model that is not cut."""
        return self._unit is not None and self._unit.once

    @property
    def compiled(self) -> bool:
        """Whether layers and head are."""
        return self._layers.chunks is not None

    def arrange(self, *, compiled: bool, kept: int | None) -> None:
        """How it is run from here on.

        Args:
            compiled: layers and head as torch.compile makes them, when they are first run; not where rows are not packed.
            kept: layers, the last ones, that keep their activations for the backward pass, None: all. The last, because theirs are gone
                when the first are run again.

        Raises:
            ConfigError: there are not as many layers.
        """
        if kept is not None and not 0 <= kept <= self.num_layers:
            raise ConfigError(
                f"trainer.activations = {kept}, but {type(self.body).__name__} has {self.num_layers or 'no list of'} layers",
                hint="set it to 'all'",
                key="trainer.activations",
                got=kept,
            )
        self._layers.arrange(compiled=compiled and self.packs and len(self._layers) > 0, kept=kept)

    def try_compiled(self, row_length: int, *, gradient: bool) -> str:
        """Run a row as a step does, so that what cannot be compiled is known before one; returns why it cannot, or an empty string.

        Where layers or rows are gathered all ranks call it, and what fails in the backward pass, or for want of memory, is raised: this
        rank cannot go on without the others.
        """
        if not self.compiled:
            return ""
        try:
            with self._layers.trying() as reasons, self.routers.rehearsing(row_length, torch.zeros(1, device=self.device)):
                with torch.set_grad_enabled(gradient):
                    found = self._run(lambda: self._first_state(row_length, reasons))
                if gradient and self._unit is not None:
                    found.sum().backward()
                elif gradient:  # of one parameter, so that none is added to a step's
                    torch.autograd.grad(found.sum(), next(self.body.parameters()), allow_unused=True)
        except RuntimeError as error:
            if self._unit is not None or self._context is not None:
                raise
            # Out of memory: a step finds its budget by itself.
            return "" if isinstance(error, torch.OutOfMemoryError) else first_line(error)
        finally:
            if self._unit is not None:
                self.module.zero_grad(set_to_none=True)
                self.forget()
        return reasons[0] if reasons else ""

    def _first_state(self, row_length: int, reasons: list[str]) -> Tensor:
        """Of a packed row, or what the compiled head makes of it; as it is where that fails, and `reasons` says why."""
        states = self._packed(self.share(trial_row(row_length)).micro)[0, :1]
        if self._linear is None or self._layers.chunks is None:
            return states
        one = torch.ones(1, device=self.device)
        head = partial(chunked_logprobs, states, one.long(), self._linear, temperature_M=one)
        try:
            return head(kernels=self._layers.chunks)[0]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reasons.append(first_line(error))
            return head(kernels=chunk_kernels(self.vocab_size, compiled=False))[0]

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by Hugging Face name; tied ones once, under their first name."""
        return self.module.named_parameters()

    def body_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Parameters of all but the output head, by their name within the body."""
        return self.body.named_parameters()

    def predict(
        self, micro: MicroBatch, batch: TrainBatch, *, entropy_gradient: bool = False, divergence: Divergence | None = None
    ) -> tuple[Tensor, ...]:
        """See `LanguageModel.predict`."""
        share = self.share(micro)
        return share.everyones(*self._run(partial(self._predict, share.micro, batch, entropy_gradient, divergence)))

    def turns(self, micros: Sequence[MicroBatch], *, learns: bool) -> Iterable[MicroBatch]:
        """See `LanguageModel.turns`: each at once."""
        return micros

    def share(self, micro: MicroBatch) -> Share:
        """What this rank computes of it."""
        return Share(micro) if self._context is None else self._context.share(micro)

    def _predict(self, micro: MicroBatch, batch: TrainBatch, entropy_gradient: bool, divergence: Divergence | None) -> tuple[Tensor, ...]:
        how = drawn(batch, micro, self.device, divergence)
        states, targets = self.states(micro), self._tensor(batch.tokens[micro.target].astype(np.int64))
        temperature = self._tensor(batch.temperature[micro.target])
        chunks = self._layers.chunks
        if chunks is not None and self._linear is not None and how.whole:
            return chunked_logprobs(
                states, targets, self._linear, temperature_M=temperature, kernels=chunks, entropy_gradient=entropy_gradient
            )
        compute = partial(
            token_logprobs if self._linear is None else linear_logprobs,
            temperature_M=temperature,
            **how.wanted,
            entropy_gradient=entropy_gradient,
            chunk_elements=self._chunk_elements,
        )
        if self._linear is None:
            return how.told(compute(states, targets, self._head, vocab_size=self.vocab_size))
        return how.told(compute(states, targets, self._linear))

    def logits(self, micro: MicroBatch, batch: TrainBatch) -> Tensor:
        """All logits [M, V] float32 at `micro.target`, with their bias, over the temperature, nothing cut off; at once in memory."""
        return self._run(partial(self._logits, micro, batch))

    def _logits(self, micro: MicroBatch, batch: TrainBatch) -> Tensor:
        temperature = self._tensor(batch.temperature[micro.target])
        logits, added = self._head(self.states(micro)), logit_bias(batch, micro, self.device)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return (logits if added is None else added.added(logits)) / temperature[:, None]

    def states(self, micro: MicroBatch) -> Tensor:
        """Hidden states [M, H] that predict `micro.target`."""
        return self._run(lambda: self._states(micro).flatten(0, 1)[self._tensor(micro.source)])

    def _run(self, compute: Callable[[], Result]) -> Result:
        """What `compute` gives, run where the model's parameters are."""
        return compute() if self._unit is None or self._unit.entered else self._unit(compute)

    def drop_head(self) -> None:
        """Forget the output head, where its weights are not the embedding's: only `states` works from here on."""
        if self.module.get_output_embeddings().weight is not self.module.get_input_embeddings().weight:
            self.module.set_output_embeddings(torch.nn.Identity())

    def limit_memory(self, tokens: int) -> None:
        """From here on a pass over more row positions than this is out of memory."""

        def refuse(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            if (got := named["input_ids"].numel()) > tokens:
                raise torch.OutOfMemoryError(f"debug.memory_tokens is {tokens}, this pass is over {got}")

        self.body.register_forward_pre_hook(refuse, with_kwargs=True)

    def _states(self, micro: MicroBatch) -> Tensor:
        if micro.starts is not None:
            return self._packed(micro)
        inputs = self._tensor(micro.inputs)
        if micro.plain:
            return self.body(input_ids=inputs, use_cache=False).last_hidden_state
        mask = packed_rows.attention_mask(self._tensor(micro.tree), self._tensor(micro.branch))
        positions = self._tensor(micro.positions)
        return self.body(input_ids=inputs, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state

    def _packed(self, micro: MicroBatch) -> Tensor:
        assert micro.starts is not None
        cut, ids = micro.cut, self._tensor(micro.inputs)
        queries, keys = (self._tensor(bounds) for bounds in ((micro.starts,) * 2 if cut is None else (cut.queries, cut.keys)))
        # Of any number of samples, the same compiled code.
        for bounds in (queries, keys):
            maybe_mark_dynamic(bounds, bounds.ndim - 1)
        longest = micro.longest if cut is None else min(micro.longest, ids.shape[1] // 2)
        options: dict[str, Any] = {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys, "max_length_q": longest, "max_length_k": micro.longest}
        if cut is not None and self._context is not None:
            options |= {"context_order": self._tensor(cut.order), "context_group": self._context.group}
        return self.body(input_ids=ids, position_ids=self._tensor(micro.positions), use_cache=False, **options).last_hidden_state

    def _head(self, states: Tensor) -> Tensor:
        logits = self.module.get_output_embeddings()(states) * self._scale
        return torch.tanh(logits / self._softcap) * self._softcap if self._softcap else logits

    @property
    def _linear(self) -> LinearHead | None:
        """The head as its numbers; None for a module that does more than a matrix product."""
        head = self.module.get_output_embeddings()
        return LinearHead(head.weight, head.bias, self._scale, self._softcap) if type(head) is torch.nn.Linear else None

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return on_device(array, self.device)

    @torch.no_grad()
    def _check_head(self) -> None:
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        ours = self._head(self.body(input_ids=ids, use_cache=False).last_hidden_state)
        theirs = self.module(input_ids=ids, use_cache=False).logits
        if ours.shape != theirs.shape or not self._close(ours, theirs):
            raise ConfigError(
                f"{self.name} does something to its logits that this trainer does not know of",
                hint="use a model whose logits are the output embedding of the last hidden state",
                model=self.name,
            )

    @torch.no_grad()
    def _masks_work(self) -> bool:
        """Whether two branches behind a shared prefix, laid out in one row, give the states of two rows."""
        row = torch.arange(2, 10, device=self.device)[None] % self.vocab_size
        branch = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2]], device=self.device)
        positions = torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]], device=self.device)
        mask = packed_rows.attention_mask(torch.zeros_like(branch), branch)
        shared = self.body(input_ids=row, position_ids=positions, attention_mask=mask, use_cache=False).last_hidden_state[0]
        first, second = (self.body(input_ids=row[:, branch[0] != other], use_cache=False).last_hidden_state[0] for other in (2, 1))
        return self._close(self._head(shared), self._head(torch.cat([first, second[4:]])))

    @torch.no_grad()
    def _packing_works(self, windows: Sequence[int | None]) -> bool:
        """Whether two samples in one packed row give the states of two rows, and each layer tells the attention its window.

        Rows long enough to see a window by what comes out would take too long, and one key of thousands too many changes hardly anything.
        """
        told: list[int | None] = []
        ids = torch.arange(2, 10, device=self.device)[None] % self.vocab_size
        starts = torch.tensor([0, 5, 8, 8], dtype=torch.int32, device=self.device)
        options = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8, "windows": told}
        positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]], device=self.device)
        row = self.body(input_ids=ids, position_ids=positions, use_cache=False, **options).last_hidden_state[0]
        alone = [self.body(input_ids=part, use_cache=False).last_hidden_state[0] for part in (ids[:, :5], ids[:, 5:])]
        return told == list(windows) and self._close(self._head(row), self._head(torch.cat(alone)))

    def _stack(self) -> list[Any]:
        """The body's layers; none where they are not known."""
        count = self.module.config.get_text_config().num_hidden_layers
        stacks = [module for module in self.body.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
        return list(stacks[0]) if stacks else []

    def _close(self, ours: Tensor, theirs: Tensor) -> bool:
        bound = PROBE_TOLERANCE.get(ours.dtype, 1e-3) * max(1.0, float(theirs.abs().max()))
        return bool((ours - theirs).abs().max() <= bound)


def _load(model_dir: Path, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM

    kernels = {"sdpa": "sdpa", "flash": "flash_attention_2", "packed": packed_rows.PACKED}[attention]
    packed_rows.register()
    experts.register()
    try:
        with BUILDING:
            return AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=dtype, attn_implementation=kernels, experts_implementation=experts.EXPERTS
            )
    except ImportError as error:
        raise ConfigError(
            f"trainer.attention = {attention} cannot be used here: {error}",
            hint="install flash-attn, or set trainer.attention = 'sdpa'",
            key="trainer.attention",
            got=attention,
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no causal language model in {model_dir}: {error}", hint="is model.path a Hugging Face directory?", path=str(model_dir)
        ) from error
