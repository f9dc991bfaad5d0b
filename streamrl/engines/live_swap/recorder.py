"""Records what a model's load_weights does: which elements of which tensor it copies to which elements of which parameter.

load_weights runs on tensors without data ("meta"), so that recording costs no memory and touches no weights. Every `copy_` from a view of
a source to a view of a parameter becomes a `Copy`; anything else that ends in a parameter (a sum, a cast, a reordering by value)
means that the weights are derived and cannot be replayed as copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.engines.live_swap.expand import expand
from streamrl.engines.live_swap.memory import memory_key
from streamrl.engines.live_swap.messages import TensorEntry
from streamrl.engines.live_swap.model import twin
from streamrl.engines.live_swap.plan import Copy, Fill, apart, canonical, merge
from streamrl.errors import WeightSyncError

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}


class Recording(msgspec.Struct, frozen=True):
    """What one run of load_weights did."""

    copies: tuple[Copy, ...]
    """Empty when it cannot be replayed."""
    why: str
    """Why it cannot; empty when it can."""
    ignored: tuple[str, ...]
    """Tensors it took nothing from."""
    fills: tuple[Fill, ...] = ()
    """Padding that no copy overwrites."""


def record(model: nn.Module, entries: Sequence[TensorEntry]) -> Recording:
    """Run `model.load_weights` without data.

    Args:
        model: the model that is served; nothing in it is written.
        entries: the tensors of a version.

    Raises:
        WeightSyncError: names, shapes or dtypes do not fit the model, or a parameter gets nothing.
    """
    names = [name for name, _ in model.named_parameters()]
    shadow: Any = twin(model, _without_data)
    recorder = _Recorder([parameter for _, parameter in shadow.named_parameters()], entries)
    try:
        with torch.no_grad(), recorder:
            shadow.load_weights(recorder.named())
    except (AssertionError, KeyError, RuntimeError, ValueError, NotImplementedError) as error:
        raise WeightSyncError(
            f"expected tensors that fit {type(model).__name__}, its load_weights says: {error or type(error).__name__}",
            hint="trainer and engine must use the same model directory and dtype",
            model=type(model).__name__,
        ) from error
    return recorder.result(names)


class _Recorder(TorchDispatchMode):
    def __init__(self, parameters: Sequence[nn.Parameter], entries: Sequence[TensorEntry]) -> None:
        super().__init__()
        self._entries = entries
        self._sources = [torch.empty(entry.shape, dtype=_dtype(entry), device="meta") for entry in entries]
        self._tensor = {memory_key(source): index for index, source in enumerate(self._sources)}
        self._parameters = parameters
        self._parameter = {memory_key(parameter): index for index, parameter in enumerate(parameters)}
        self._copies: list[Copy] = []
        self._fills: list[Fill] = []
        self._written = [0] * len(parameters)
        self._why = ""

    def named(self) -> Iterator[tuple[str, Tensor]]:
        for entry, source in zip(self._entries, self._sources, strict=True):
            yield from expand(entry.name, source)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copied(args[0], args[1])
            return args[0]
        if func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            self._filled(*args)
            return args[0]
        if func is torch.ops.aten._to_copy.default and self._moved_only(args[0], kwargs or {}):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _moved_only(self, tensor: Tensor, kwargs: Mapping[str, Any]) -> bool:
        return memory_key(tensor) in self._tensor and kwargs.get("dtype", tensor.dtype) == tensor.dtype

    def _copied(self, target: Tensor, source: Tensor) -> None:
        parameter = self._parameter.get(memory_key(target))
        if parameter is None or not target.numel():
            return
        tensor = self._tensor.get(memory_key(source))
        name = self._entries[tensor].name if tensor is not None else "a tensor"
        if tensor is None:
            self._why = self._why or "load_weights computes parameters instead of copying them"
        elif target.dtype != source.dtype:
            raise WeightSyncError(
                f"expected {str(target.dtype).removeprefix('torch.')} for {name}, got {str(source.dtype).removeprefix('torch.')}",
                hint="set trainer.dtype to the dtype that the engine serves",
                tensor=name,
                got=str(source.dtype),
            )
        else:
            shape = target.shape
            copy = canonical(
                tensor,
                parameter,
                shape,
                (int(source.storage_offset()), source.expand(shape).stride()),
                (int(target.storage_offset()), target.stride()),
            )
            if copy is None:
                self._why = self._why or f"{name} is not copied in rows"
            else:
                self._copies.append(copy)
        self._wrote(target)

    def _filled(self, target: Tensor, value: float = 0.0) -> None:
        parameter = self._parameter.get(memory_key(target))
        if parameter is None or not target.numel():
            return
        where = (int(target.storage_offset()), target.stride())
        place = canonical(0, parameter, target.shape, where, where)
        if place is not None:
            self._fills.append(Fill(place, float(value)))
        self._wrote(target)

    def _wrote(self, target: Tensor) -> None:
        parameter = self._parameter.get(memory_key(target))
        if parameter is not None:
            self._written[parameter] += target.numel()

    def result(self, names: Sequence[str]) -> Recording:
        for name, parameter, written in zip(names, self._parameters, self._written, strict=True):
            if written < parameter.numel():
                raise WeightSyncError(
                    f"expected tensors for all of parameter {name} {tuple(parameter.shape)}, got {written} of {parameter.numel()} elements",
                    hint="trainer and engine must use the same model directory",
                    tensor=name,
                    elements=written,
                )
        taken = {copy.tensor for copy in self._copies}
        ignored = tuple(entry.name for index, entry in enumerate(self._entries) if index not in taken and math.prod(entry.shape))
        if self._why:
            return Recording((), self._why, ())
        copies = merge(self._copies)
        onto: dict[int, list[Copy]] = {}
        for copy in copies:
            onto.setdefault(copy.parameter, []).append(copy)
        fills = tuple(fill for fill in self._fills if all(apart(fill.place, copy) for copy in onto.get(fill.place.parameter, ())))
        return Recording(tuple(copies), "", ignored, fills)


def _without_data(parameter: nn.Parameter) -> Tensor:
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="meta")


def _dtype(entry: TensorEntry) -> torch.dtype:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise WeightSyncError(f"tensor {entry.name!r}: expected a dtype out of {', '.join(DTYPES)}, got {entry.dtype!r}")
    return dtype
