"""Where the tokens of each cache row went in a mixture of experts, pass by pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from streamrl.engines.experts import Routing
from streamrl.errors import ConfigError
from streamrl.schemas.experts import RoutedExperts, compact


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
