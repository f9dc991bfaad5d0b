"""A second model object for load_weights: the modules of the first, with parameters of its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.engines.live_swap.memory import memory_key
from streamrl.tensors.names import KEPT

Make = Callable[[nn.Parameter], Tensor]
_POSITIONS = re.compile(r"(^|_)(cos|sin|freqs?|slopes?|position)(_|$)")
"""Names of tensors that come from the configuration alone."""


def twin(model: nn.Module, make: Make) -> nn.Module:
    """A model whose modules share everything with the given one's but their parameters.

    No deep copy: that fails on process groups and drops what parameters carry (`weight_loader`). Module attributes that hold modules
    or parameters (caches of named parameters, lists of layers) are rebuilt to point into the twin, so that its load_weights cannot
    write to the model that is being served.

    Args:
        model: left as it is.
        make: gives the data of a parameter's counterpart.
    """
    return _Twin(make).module(model)


class _Twin:
    def __init__(self, make: Make) -> None:
        self._make = make
        self._modules: dict[int, nn.Module] = {}
        self._parameters: dict[int, nn.Parameter] = {}

    def module(self, module: nn.Module) -> nn.Module:
        known = self._modules.get(id(module))
        if known is not None:
            return known
        copy = object.__new__(type(module))
        self._modules[id(module)] = copy
        vars(copy).update({key: self._value(value, depth=0) for key, value in vars(module).items()})
        return copy

    def parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        known = self._parameters.get(id(parameter))
        if known is None:
            base: Any = torch.Tensor
            known = base._make_subclass(type(parameter), self._make(parameter), False)
            vars(known).update(vars(parameter))
            self._parameters[id(parameter)] = known
        return known

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, nn.Parameter):
            return self.parameter(value)
        if isinstance(value, nn.Module):
            return self.module(value)
        if depth > 2:
            return value
        # Exact types: a subclass may have invariants of its own.
        if type(value) is dict:
            return {key: self._value(item, depth + 1) for key, item in value.items()}
        if type(value) is list:
            return [self._value(item, depth + 1) for item in value]
        if type(value) is tuple:
            return tuple(self._value(item, depth + 1) for item in value)
        return value


def aliases(model: nn.Module) -> list[str]:
    """Tensors kept outside the parameters that share their memory: a flip of parameters would leave them behind."""
    storages = {memory_key(parameter) for parameter in model.parameters()}
    return [f"{path}.{key}" for path, module in model.named_modules() for key, tensor in _loose(module) if memory_key(tensor) in storages]


def left_out(model: nn.Module) -> list[str]:
    """Weights of the model that a version would not reach.

    They are parameters that no version carries, and tensors that were computed from parameters when these were loaded, such as `w_kc` of
    latent attention and `weight + 1` of a norm. Tables of positions are none.
    """
    storages = {memory_key(parameter) for parameter in model.parameters()}
    found = [name for name, _ in model.named_parameters() if name.endswith(KEPT)]
    for path, module in model.named_modules():
        for key, tensor in (*_loose(module), *module.named_buffers(recurse=False)):
            if _POSITIONS.search(key) or not tensor.is_floating_point() or not tensor.dim() or memory_key(tensor) in storages:
                continue
            if key == "weight" and bool((tensor == 1).all()):  # of a norm without one
                continue
            found.append(f"{path}.{key}".lstrip("."))
    return list(dict.fromkeys(found))


def _loose(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for key, value in module.__dict__.items():
        if key.startswith("_"):
            continue
        values = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for item in values:
            if isinstance(item, Tensor) and not isinstance(item, nn.Parameter) and item.layout == torch.strided:
                yield key, item
