"""A Qwen or Llama that megatron-core runs, as `LanguageModel`. Letters as in `streamrl.core.packing`, `D` size of a head."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._dynamo.decorators import maybe_mark_dynamic

from streamrl.algorithms.chunked_head import chunked_logprobs
from streamrl.algorithms.divergences import Divergence
from streamrl.algorithms.logprobs import CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS, LinearHead, linear_logprobs
from streamrl.algorithms.vocab_parallel import vocab_parallel_logprobs
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import MicroBatch, trial_row
from streamrl.errors import ConfigError
from streamrl.models.megatron.names import Architecture, Part, Place, parameters
from streamrl.tensors.transfer import on_device
from streamrl.trainers.drawn import drawn, logit_bias
from streamrl.trainers.flops import ModelFlops, model_flops
from streamrl.trainers.megatron.buildable import ROPES, read_architecture
from streamrl.trainers.megatron.core import Attend, Decoder
from streamrl.trainers.megatron.experts import Mixture, TopKRouter, in_matrices
from streamrl.trainers.megatron.leaves import Leaf, Leaves
from streamrl.trainers.megatron.pipeline import Pipeline
from streamrl.trainers.megatron.ranks import HeldBoxes, MegatronParallel, check_samples
from streamrl.trainers.torch.attention import attention_mask, packed_attention
from streamrl.trainers.torch.context import Share
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.layers import Layers
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.routing import Routers
from streamrl.trainers.torch.sharding import Held, Slice, as_named


class MegatronLM:
    """Implements `LanguageModel`. All tensor ranks make it, and call it, together.

    Args:
        model_dir: Hugging Face directory with safetensors.
        dtype: that it computes in and publishes; leaves and moments are float32.
        device: where it lies.
        kernels: how its layers and its head are run.
        parallel: its ranks.
        timeout_s: longest that a rank waits for another; None: another model was made before it, on the same ranks.
        frozen: no gradient is asked of it.
        renewed: a frozen one's parameters are written later; else it keeps no leaves.
        headless: it has no output layer, and gives states alone.

    Raises:
        ConfigError: an architecture or a variant that is not known, a mesh that does not divide it, or megatron-core is missing.
    """

    def __init__(
        self,
        model_dir: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: Kernels,
        parallel: MegatronParallel,
        timeout_s: float | None = None,
        frozen: bool = False,
        renewed: bool = False,
        headless: bool = False,
    ) -> None:
        from transformers import AutoConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        tensors, experts, stages = parallel.tensors, parallel.expert_parts, parallel.stages
        self.config, self.arch = read_architecture(model_dir, tensors, experts, stages)
        settings: Any = AutoConfig.from_pretrained(model_dir)
        rope: Any = LlamaRotaryEmbedding(settings)
        if rope.rope_type not in ROPES or rope.attention_scaling != 1:
            raise ConfigError(
                f"{model_dir}: expected rotary embeddings of type {', '.join(ROPES)}, got {rope.rope_type}",
                hint="the backend `torch` trains what transformers can",
                path=str(model_dir),
                got=rope.rope_type,
            )
        self._frequencies: Tensor = rope.inv_freq.float().to(device)
        self.name, self.device, self.dtype, self.width, self.vocab_size = "GPTModel", device, dtype, self.arch.hidden, self.arch.vocabulary
        self.packs = kernels.attention == "packed"
        self.windowed, self.free_masks = False, not self.packs
        self.gathers_once = False
        self._parallel = parallel
        replica = parallel.copy * experts + (parallel.lane if experts > 1 else 0)
        place = Place(
            tensor=parallel.lane % tensors, tensors=tensors, stage=parallel.stage, stages=stages, replica=replica, expert_parts=experts
        )
        mixture = partial(_mixture, self.arch, settings, parallel) if self.arch.experts else None
        self._decoder = Decoder(
            self.arch,
            settings.rms_norm_eps,
            place=place,
            dtype=dtype,
            device=device,
            timeout_s=timeout_s,
            mixture=mixture,
            headless=headless,
        )
        self._layers = Layers(self._decoder.layers, self.arch.vocabulary, self._decoder.run_again)
        self.num_layers = len(self._layers)
        self._pipeline = Pipeline(parallel.line, dtype, device) if parallel.line is not None else None
        routers = [one for one in self._decoder.module.modules() if isinstance(one, TopKRouter)]
        self.routers = Routers(routers, normalized=self.arch.experts > 0 and settings.norm_topk_prob)
        here, whole = (list(in_matrices(parameters(self.arch, one, headless=headless), self.arch.experts)) for one in (place, Place()))
        shapes = {part.name: part.shape for one in whole for part in one.parts}
        doubled = "model.embed_tokens.weight" if self.arch.tied and stages > 1 and not headless else ""
        self._leaves = Leaves(
            self._decoder.module, here, shapes, partial(_shared, experts), self.arch.model_type, doubled=doubled, trained=not frozen
        )
        self._leaves.read(model_dir, dtype)
        if not headless:
            head = self._leaves.parts()["model.embed_tokens.weight" if self.arch.tied else "lm_head.weight"]
            self._first, self._own_rows = head.offset[0], head.run
        if not frozen:
            parallel.leaves = self._leaves.leaves
        elif not renewed:
            self._leaves.let_go()
        ends = ("model.embed_tokens.weight", "lm_head.weight")
        body = [(name, int(np.prod(shape))) for name, shape in shapes.items() if name not in ends]
        self.flops: ModelFlops | None = model_flops(settings, body, self.arch.vocabulary * self.arch.hidden)
        self._most_positions = 0
        if not frozen and isinstance(kernels.kept_layers, int):
            self.arrange(compiled=False, kept=kernels.kept_layers)
        self._held: HeldBoxes | None = None

    def arrange(self, *, compiled: bool, kept: int | None) -> None:
        """See `CausalLM.arrange`; raises ConfigError where a rank has fewer layers than are to keep their activations."""
        if kept is not None and not 0 <= kept <= self.num_layers:
            raise ConfigError(
                f"trainer.activations = {kept}, but a rank has {self.num_layers} layers",
                hint="set it to 'all'",
                key="trainer.activations",
                got=kept,
            )
        self._layers.arrange(compiled=compiled, kept=kept)

    def try_compiled(self, row_length: int, *, gradient: bool) -> str:
        """See `CausalLM.try_compiled`; each stage runs its layers, from zeros. What fails in the head, or backwards, is raised."""
        if self._layers.chunks is None:
            return ""
        micro = self.share(trial_row(row_length)).micro
        given = None if self._decoder.first else torch.zeros(self._handed_on(micro), dtype=self.dtype, device=self.device)
        with self._layers.trying() as reasons, self.routers.rehearsing(row_length, torch.zeros(1, device=self.device)):
            with torch.set_grad_enabled(gradient):
                found = self._stage(micro, given)
            if gradient:  # of one parameter, so that none is added to a step's
                torch.autograd.grad(found.sum(), next(self._decoder.module.parameters()), allow_unused=True)
        return reasons[0] if reasons else ""

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Of all ranks' parameters, in their order."""
        return self._leaves.leaves

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Leaves by Hugging Face name."""
        return self._leaves.named()

    def cut(self, parallel: Parallel, *, trained: bool) -> Held:
        """It is cut by its making."""
        assert parallel is self._parallel
        types = {name: self.dtype for name, _ in self.parameters()}
        held = HeldBoxes(self.leaves, types, self._parallel, self.arch.model_type, published=trained)
        if trained:
            self._held = held
            held.refresh()
        return held

    def turns(self, micros: Sequence[MicroBatch], *, learns: bool) -> Iterable[MicroBatch]:
        """See `LanguageModel.turns`."""
        if self._pipeline is None:
            return micros
        return self._pipeline.turns(micros, self._stage_of, lambda micro: self._handed_on(self.share(micro).micro), learns=learns)

    def _stage_of(self, micro: MicroBatch, given: Tensor | None) -> Tensor:
        return self._stage(self.share(micro).micro, given)

    def accumulate(self, *, last: bool) -> None:
        """Nothing waits for the last micro-batch."""

    def forget(self) -> None:
        """The leaves have been written: round them into the parameters, and into what is published."""
        self._leaves.write()
        if self._held is not None:
            self._held.refresh()

    def predict(
        self, micro: MicroBatch, batch: TrainBatch, *, entropy_gradient: bool = False, divergence: Divergence | None = None
    ) -> tuple[Tensor, ...]:
        """See `LanguageModel`; raises ConfigError for tokens of a restricted distribution over a split vocabulary."""
        share = self.share(micro)
        return share.everyones(*self._predict(share.micro, batch, entropy_gradient, divergence))

    def _predict(self, micro: MicroBatch, batch: TrainBatch, entropy_gradient: bool, divergence: Divergence | None) -> tuple[Tensor, ...]:
        how = drawn(batch, micro, self.device, divergence)
        check_samples(self._parallel.tensors, bool(how.cut or how.likeliest))
        states, targets = self.states(micro), self._tensor(batch.tokens[micro.target].astype(np.int64))
        temperature, head = self._tensor(batch.temperature[micro.target]), self._head()
        if self._layers.chunks is not None and self._parallel.tensors == 1 and how.whole:
            kernels = self._layers.chunks
            return chunked_logprobs(states, targets, head, temperature_M=temperature, kernels=kernels, entropy_gradient=entropy_gradient)
        chunk = CHUNK_ELEMENTS if self.device.type == "cpu" else GPU_CHUNK_ELEMENTS
        if self._parallel.tensors > 1:
            return vocab_parallel_logprobs(
                states,
                targets,
                head,
                first=self._first,
                group=self._decoder.group,
                temperature_M=temperature,
                logit_bias=how.logit_bias,
                entropy_gradient=entropy_gradient,
                chunk_elements=chunk,
            )
        found = linear_logprobs(
            states, targets, head, temperature_M=temperature, **how.wanted, entropy_gradient=entropy_gradient, chunk_elements=chunk
        )
        return how.told(found)

    def logits(self, micro: MicroBatch, batch: TrainBatch) -> Tensor:
        """See `LanguageModel`; of a vocabulary in one part."""
        check_samples(self._parallel.tensors, restricted=True)
        temperature = self._tensor(batch.temperature[micro.target])
        found, added = self.states(micro) @ self._head().weight.T, logit_bias(batch, micro, self.device)
        found = found if found.dtype == torch.float64 else found.float()
        return (found if added is None else added.added(found)) / temperature[:, None]

    def limit_memory(self, tokens: int) -> None:
        """See `LanguageModel`."""
        self._most_positions = tokens

    def save_pretrained(self, directory: Path, parameters: Mapping[str, Tensor] | None) -> None:
        """Weights, and the configuration that they were read with."""
        values = parameters or {name: value.detach().to(self.dtype).cpu() for name, value in self.parameters()}
        named = [
            one for name, value in values.items() for one in as_named(Slice(name, value, tuple(value.shape), ()), self.arch.model_type)
        ]
        save_file({one.name: one.rows.contiguous() for one in named}, directory / "model.safetensors", metadata={"format": "pt"})
        dtype = str(self.dtype).removeprefix("torch.")
        kept = {key: value for key, value in self.config.items() if key not in ("dtype", "torch_dtype")}
        (directory / "config.json").write_text(json.dumps({**kept, "dtype": dtype}, indent=2))

    def _head(self) -> LinearHead:
        """This rank's rows of the vocabulary, without padding."""
        return LinearHead(self._decoder.head[: self._own_rows], None, 1.0, 0.0)

    def share(self, micro: MicroBatch) -> Share:
        """All of it, or its part of a row that replicas share; tensor ranks and stages have the same."""
        return Share(micro) if self._parallel.context is None else self._parallel.context.share(micro)

    def states(self, micro: MicroBatch) -> Tensor:
        """[M, H] that predict `micro.target`; of several stages the last one has them, at the micro-batch's turn."""
        length = micro.inputs.shape[1]
        states = self._stage(micro, None if self._pipeline is None else self._pipeline.given)
        return states[:, :length].flatten(0, 1)[self._tensor(micro.source)]

    def _handed_on(self, micro: MicroBatch) -> tuple[int, ...]:
        """Shape of what a stage hands to the next one."""
        rows, length = micro.inputs.shape
        return -(-length // self._parallel.tensors), rows, self.width

    def _stage(self, micro: MicroBatch, given: Tensor | None) -> Tensor:
        """This rank's layers, of what the stage before it made of a micro-batch."""
        rows, length = micro.inputs.shape
        if 0 < self._most_positions < rows * length:
            raise torch.OutOfMemoryError(f"debug.memory_tokens is {self._most_positions}, this pass is over {rows * length}")
        # Sequence parallelism cuts rows: padding at their ends makes L a multiple of the tensor ranks, and nothing looks at it.
        padding = -length % self._parallel.tensors
        ids, positions = (self._tensor(np.pad(each, ((0, 0), (0, padding)))) for each in (micro.inputs, micro.positions))
        turned = positions.T[:, :, None, None].float() * self._frequencies
        return self._decoder.states(ids, torch.cat([turned, turned], -1), self._attend(micro, padding), given)

    def _attend(self, micro: MicroBatch, padding: int) -> Attend:
        if micro.starts is None and not micro.plain:
            tree, branch = (self._tensor(np.pad(each, ((0, 0), (0, padding)), mode="edge")) for each in (micro.tree, micro.branch))
            mask = attention_mask(tree, branch)

            def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                grouped = query.shape[1] != key.shape[1]
                found = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
                return found.transpose(1, 2)

            return masked
        if micro.cut is not None and self._parallel.context is not None:
            cut, group = micro.cut, self._parallel.context.group
            queries, keys, order = (self._tensor(each) for each in (cut.queries, cut.keys, cut.order))
            for bounds in (queries, keys):
                maybe_mark_dynamic(bounds, bounds.ndim - 1)
            longest = min(micro.longest, micro.inputs.shape[1] // 2)

            def shared(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                return packed_attention(
                    self._decoder.module,
                    query,
                    key,
                    value,
                    None,
                    cu_seq_lens_q=queries,
                    cu_seq_lens_k=keys,
                    max_length_q=longest,
                    max_length_k=micro.longest,
                    context_order=order,
                    context_group=group,
                )[0]

            return shared
        module, starts, longest = self._decoder.module, None, micro.longest + padding
        if micro.starts is not None:
            ends = micro.starts.copy()
            ends[-1] += padding
            maybe_mark_dynamic(starts := self._tensor(ends), 0)  # of any number of samples, the same compiled code

        def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return packed_attention(module, query, key, value, None, cu_seq_lens_q=starts, max_length_q=longest)[0]

        return causal

    def _tensor(self, array: npt.NDArray[Any]) -> Tensor:
        return on_device(array, self.device)


def _mixture(arch: Architecture, settings: Any, parallel: MegatronParallel) -> Mixture:
    router = TopKRouter(arch.experts, settings.num_experts_per_tok, arch.hidden, normalized=settings.norm_topk_prob)
    return Mixture(router, hidden=arch.hidden, inner=arch.intermediate, parts=parallel.expert_parts, group=parallel.parts_group)


def _shared(experts: int, part: Part) -> bool:
    """Whether every part of the mesh holds it: norms of tensor ranks, all but the experts of expert ranks."""
    return part.held == part.shape and (".mlp.experts." not in part.name if experts > 1 else part.name.endswith("norm.weight"))
