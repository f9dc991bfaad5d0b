"""The local engine's policy: a transformers model's parameters in two buffers, its cache rows, and one pass at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from streamrl.config.recording import NOTHING, Recording
from streamrl.engines.batching.buffers import TensorLayout, offsets
from streamrl.engines.batching.model import Drawn, Draws
from streamrl.engines.experts import Routing, read_routing
from streamrl.engines.local.cache import HeadShape, Pass, SlotCache
from streamrl.engines.local.functional import GLUED, FunctionalForward, Weights, buffer_order, supports
from streamrl.engines.local.modules import ModuleForward, check_config
from streamrl.engines.local.sampling import draw
from streamrl.errors import ConfigError
from streamrl.schemas.candidates import joined
from streamrl.schemas.experts import RoutedExperts, compact
from streamrl.tensors.building import BUILDING
from streamrl.tensors.names import named


class RowExperts:
    """Keeps what a model's routers chose; of layers without experts zeros, as SGLang says them.

    Args:
        decoder: the model's layers; its routers give (logits, weights, numbers [tokens, k] of the chosen experts).
        routing: what the model's description says.
        slots: rows.
        max_len: longest sequence.

    Raises:
        ConfigError: the routers are not known.
    """

    def __init__(self, decoder: nn.Module, routing: Routing, *, slots: int, max_len: int) -> None:
        self._routing = routing
        self._chosen: dict[int, Tensor] = {}
        self._kept = np.zeros((slots, max_len, routing.layers, routing.per_token), np.uint8 if routing.experts <= 256 else np.uint16)
        found = [name for name, module in decoder.named_modules() if type(module).__name__.endswith("TopKRouter")]
        if not found:
            raise ConfigError(
                f"trainer.routing_replay needs routers that are known, got a {type(decoder).__name__} without any",
                hint="leave it out",
                key="trainer.routing_replay",
            )
        for name in found:
            decoder.get_submodule(name).register_forward_hook(self._heard(int(name.split(".")[1])))  # layers.3.mlp.gate

    def _heard(self, layer: int) -> Any:
        def hear(module: Any, given: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
            self._chosen[layer] = output[2]

        return hear

    def prefilled(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Behind a pass over prompts of which the first `lengths[i]` positions are those of `rows[i]`."""
        found = self._taken().reshape(len(rows), -1, *self._kept.shape[2:])
        for index, (of_prompt, length) in enumerate(zip(rows, lengths, strict=True)):
            self._kept[list(of_prompt), :length] = found[index, :length]

    def decoded(self, first: int, positions: npt.NDArray[np.int64]) -> None:
        """Behind a pass over one token of each row from `first` on, at these positions."""
        self._kept[np.arange(first, first + len(positions)), positions] = self._taken()

    def moved(self, targets: Sequence[int], sources: Sequence[int], longest: int) -> None:
        """Rows have other numbers."""
        self._kept[targets, :longest] = self._kept[sources, :longest]

    def of(self, row: int, length: int) -> RoutedExperts:
        """Of a row's first tokens."""
        return compact(self._kept[row, :length], self._routing.experts)

    def _taken(self) -> npt.NDArray[np.unsignedinteger]:
        """[tokens, layers, k] of the pass."""
        chosen = {layer: one.cpu().numpy() for layer, one in self._chosen.items()}
        found = np.zeros((len(next(iter(chosen.values()))), *self._kept.shape[2:]), self._kept.dtype)
        for layer, one in chosen.items():
            found[:, layer] = one
        self._chosen = {}
        return found


logger = logging.getLogger(__name__)

Bound = tuple[str, list[TensorLayout], tuple[int, ...]]
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass; more joiners are prefilled in several passes."""


class Forward(Protocol):
    """A forward pass over the slot cache. Adapters: `FunctionalForward` (fast) and `ModuleForward` (any model)."""

    def head_shapes(self) -> Sequence[HeadShape]: ...

    def attach(self, cache: SlotCache) -> None: ...

    def prefill(self, tokens: Tensor, step: Pass) -> None: ...

    def decode(self, tokens: Tensor, step: Pass) -> Tensor: ...


class LocalModel:
    """`streamrl.engines.batching.model.DecodeModel` over a Hugging Face causal LM; weights come from commits only.

    Args:
        model_dir: holds `config.json` (and `generation_config.json` for the end tokens, if there is one).
        slots: rows of the cache.
        max_len: longest sequence in tokens.
        threads: CPU threads of the decode thread's operations.
        deterministic: compute every row alone, so that nothing it is batched with changes a bit of it.
        forward: `functional` where the architecture is known, else `modules`; `auto` chooses.
        device: where the weights and the cache lie.
        dtype: type of the weights; None: the configuration's.
        routed: keep where tokens go.
        recording: what `step` says beside tokens.

    Raises:
        ConfigError: no usable configuration in `model_dir`; a model with weights that no version carries; `routed`, and it is no mixture
            of experts whose routers are known.
        EngineError: an architecture that the cache cannot hold.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        slots: int,
        max_len: int,
        threads: int,
        deterministic: bool,
        forward: Literal["auto", "functional", "modules"],
        device: torch.device,
        dtype: torch.dtype | None = None,
        routed: bool = False,
        recording: Recording = NOTHING,
    ) -> None:
        config = _read_config(model_dir)
        check_config(config)
        self.vocab_size: int = config.get_text_config().vocab_size
        self.max_len = max_len
        self.eos_ids = _eos_ids(model_dir, config)
        self._device = device
        self._threads = threads
        self._deterministic = deterministic
        dtype = dtype or (config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32)
        model = _empty_model(config, dtype, device)
        _check_buffers(model, config)
        parameters = dict(model.named_parameters())
        known = supports(config, list(parameters))
        if forward == "functional" and not known:
            raise ConfigError(f"expected a Llama-like model for the functional forward, got {config.model_type}", hint="use forward='auto'")
        self._functional: FunctionalForward | None = None
        if known and forward != "modules":
            rotary: nn.Module = model.get_decoder().rotary_emb  # type: ignore[assignment]
            self._functional = FunctionalForward(config, rotary, max_len=max_len, dtype=dtype, device=device)
        self._bound = _bound(config, parameters, fused=self._functional is not None)
        self.layout = tuple(tensor for _, tensors, _ in self._bound for tensor in tensors)
        # The modules' own parameters are re-pointed at a commit; the functional forward has no modules.
        self._parameters = {} if self._functional else parameters
        self._forward: Forward = self._functional or ModuleForward(model)
        self._cache = SlotCache(self._forward.head_shapes(), slots=slots, max_len=max_len, dtype=dtype, device=device)
        self._forward.attach(self._cache)
        self._recording = recording
        self._experts = _row_experts(model, model_dir, slots, max_len) if routed else None
        self._lengths = np.zeros(slots, np.int64)
        """Positions of each row that hold keys and values."""
        self._host: tuple[Tensor, ...] = ()
        self._on_device: tuple[Tensor, ...] = ()
        self._views: list[dict[str, Tensor]] = []
        self._weights: list[Weights | None] = [None, None]
        logger.info(
            "event=model_built model_type=%s functional=%s device=%s dtype=%s slots=%d",
            *(config.model_type, bool(self._functional), device, dtype, slots),
        )

    def bind(self, buffers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """See `DecodeModel.bind`. On a CPU the parameters are views of the buffers, elsewhere of a copy on the device."""
        self._host = tuple(torch.from_numpy(buffer) for buffer in buffers)
        self._on_device = tuple(host.to(self._device) for host in self._host)
        starts = offsets(self.layout)
        for buffer in self._on_device:
            views: dict[str, Tensor] = {}
            for name, tensors, shape in self._bound:
                first = starts[tensors[0].name]
                raw = buffer[first : first + sum(tensor.nbytes for tensor in tensors)]
                views[name] = raw.view(getattr(torch, tensors[0].dtype)).view(shape)
            self._views.append(views)

    def prepare(self, index: int) -> None:
        """See `DecodeModel.prepare`."""
        if self._device.type != "cpu":
            self._on_device[index].copy_(self._host[index])
            torch.cuda.synchronize(self._device)
        if self._functional is not None:
            self._weights[index] = self._functional.collect(self._views[index])

    def activate(self, index: int) -> None:
        """See `DecodeModel.activate`."""
        weights = self._weights[index]
        if self._functional is not None:
            assert weights is not None
            self._functional.use(weights)
        for name, parameter in self._parameters.items():
            parameter.data = self._views[index][name]

    @contextmanager
    def thread(self) -> Generator[None]:
        """See `DecodeModel.thread`."""
        torch.set_num_threads(self._threads)
        with torch.inference_mode():
            yield

    def join(self, rows: Sequence[int], prompts: Sequence[tuple[int, ...]]) -> None:
        """See `DecodeModel.join`. Rows with one prompt share its prefill."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, prompt in zip(rows, prompts, strict=True):
            groups.setdefault(prompt, []).append(row)
            self._lengths[row] = len(prompt) - 1
        batch: list[tuple[int, ...]] = []
        for prompt in sorted((prompt for prompt in groups if len(prompt) > 1), key=len):
            if batch and (self._deterministic or (len(batch) + 1) * (len(prompt) - 1) > PREFILL_TOKENS):
                self._prefill(batch, groups)
                batch = []
            batch.append(prompt)
        if batch:
            self._prefill(batch, groups)

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """See `DecodeModel.move`."""
        self._lengths[targets] = self._lengths[sources]
        longest = int(self._lengths[sources].max())
        self._cache.move(targets, sources, longest)
        if self._experts is not None:
            self._experts.moved(targets, sources, longest)

    def experts(self, row: int) -> RoutedExperts | None:
        """See `DecodeModel.experts`."""
        return None if self._experts is None else self._experts.of(row, int(self._lengths[row]))

    def step(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], drawn: npt.NDArray[np.int64], draws: Draws) -> Drawn:
        """See `DecodeModel.step`; row i of the batch is row i of the cache."""
        n = len(tokens)
        self._lengths[:n] = positions + 1
        if not self._deterministic:
            return draw(self._decode(tokens, positions, 0), draws, self._recording)
        found: list[Drawn] = []
        for row in range(n):
            part = slice(row, row + 1)
            found.append(draw(self._decode(tokens[part], positions[part], row), draws.row(row), self._recording))
        ids, logprobs, candidates = zip(*found, strict=True)
        of_rows = [one for one in candidates if one is not None]
        return Drawn(np.concatenate(ids), np.concatenate(logprobs), joined(of_rows) if of_rows else None)

    def _prefill(self, batch: list[tuple[int, ...]], groups: dict[tuple[int, ...], list[int]]) -> None:
        longest = len(batch[-1]) - 1
        tokens = torch.tensor([prompt[:-1] + (0,) * (longest + 1 - len(prompt)) for prompt in batch], device=self._device)
        rows = [row for prompt in batch for row in groups[prompt]]
        source = [index for index, prompt in enumerate(batch) for _ in groups[prompt]]
        self._forward.prefill(tokens, self._cache.begin_prefill(rows, source, longest))
        if self._experts is not None:
            self._experts.prefilled([groups[prompt] for prompt in batch], [len(prompt) - 1 for prompt in batch])

    def _decode(self, tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], first: int) -> Tensor:
        longest = int(positions.max()) + 1
        at = torch.from_numpy(positions).to(self._device)
        step = self._cache.begin_decode(at, first=first, longest=longest, ragged=bool(positions.min() + 1 < longest))
        logits = self._forward.decode(torch.from_numpy(tokens).to(self._device), step)
        if self._experts is not None:
            self._experts.decoded(first, positions)
        return logits


def _row_experts(model: PreTrainedModel, model_dir: Path, slots: int, max_len: int) -> RowExperts:
    routing = read_routing(model_dir)
    if routing is None:
        raise ConfigError(
            f"trainer.routing_replay is for a mixture of experts, but {model_dir} holds none",
            hint="leave it out",
            key="trainer.routing_replay",
        )
    return RowExperts(model.get_decoder(), routing, slots=slots, max_len=max_len)


def _read_config(model_dir: Path) -> PretrainedConfig:
    if not (model_dir / "config.json").is_file():
        raise ConfigError(
            f"expected config.json in {model_dir}, got none", hint="set model.path to a Hugging Face model directory", path=str(model_dir)
        )
    try:
        return AutoConfig.from_pretrained(model_dir)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"expected a Hugging Face configuration in {model_dir}, got: {error}", hint="is it known to transformers?"
        ) from error


def _empty_model(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    # The bytes come with the first commit, and until then nothing is served: no time is spent on random ones.
    with BUILDING, no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()
    cast(nn.Module, model).to(device).eval().requires_grad_(False)
    return model


def _check_buffers(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """Refuse a model whose checkpoint has more than its parameters: a version is those, and the rest would be as the class makes it."""
    saved = model.state_dict().keys()
    if left := [name for name, one in model.named_buffers() if name in saved and one.is_floating_point() and one.dim()]:
        raise ConfigError(
            f"expected a model whose weights are its parameters, got a {config.model_type} with {left[0]}, which no version carries",
            hint="the local engine would sample by another policy than the one that is trained; choose another model",
            key="model.path",
            tensor=left[0],
        )


def _bound(config: PretrainedConfig, parameters: Mapping[str, Tensor], *, fused: bool) -> list[Bound]:
    """Each parameter, the tensors of a version that follow each other in its memory, and its shape."""
    found: list[Bound] = []
    for name in buffer_order(config, list(parameters)) if fused else list(parameters):
        shape, dtype = tuple(parameters[name].shape), str(parameters[name].dtype).removeprefix("torch.")
        glued = fused and name.endswith(GLUED)
        parts = enumerate(named(config.model_type, name, shape))
        found.append((name, [TensorLayout(one.name, dtype, one.shape, glued or index > 0) for index, one in parts], shape))
    return found


def _eos_ids(model_dir: Path, config: PretrainedConfig) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    found: Any = None
    if path.is_file():
        found = json.loads(path.read_text()).get("eos_token_id")
    if found is None:
        found = config.get_text_config().eos_token_id
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)
