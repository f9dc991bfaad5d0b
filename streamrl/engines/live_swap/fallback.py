"""Staging of weights that the model derives from a version's tensors instead of copying them: its load_weights runs for each version."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamrl.engines.live_swap.expand import expand
from streamrl.engines.live_swap.layout import Layout
from streamrl.engines.live_swap.model import twin
from streamrl.engines.live_swap.sources import DeviceSpan
from streamrl.errors import WeightSyncError
from streamrl.tensors.digest_torch import tensor_digests


class DerivedLoad:
    """A twin of the model whose parameters are the idle buffer. It allocates and takes the interpreter's lock: slower than a plan.

    What a version brings can be digested only as it arrives, not as it is served.
    """

    def __init__(self, model: nn.Module) -> None:
        self._twin: Any = twin(model, lambda parameter: parameter.data)

    def load(self, parameters: Sequence[Tensor], layout: Layout, spans: Sequence[DeviceSpan], *, verify: bool) -> tuple[int, ...]:
        """Write a version into a buffer.

        Args:
            parameters: the buffer.
            layout: of the version.
            spans: the version's bytes.
            verify: give each tensor's digest.

        Raises:
            WeightSyncError: a tensor does not lie in one span, or the model refuses it.
        """
        for parameter, tensor in zip(self._twin.parameters(), parameters, strict=True):
            parameter.data = tensor
        named = list(_tensors(layout, spans))
        try:
            self._twin.load_weights(part for name, tensor in named for part in expand(name, tensor))
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise WeightSyncError(f"expected tensors that fit {type(self._twin).__name__}, its load_weights says: {error}") from error
        return tuple(tensor_digests([tensor for _, tensor in named])) if verify else ()


def _tensors(layout: Layout, spans: Sequence[DeviceSpan]) -> Iterator[tuple[str, Tensor]]:
    for entry, dtype in zip(layout.entries, layout.dtypes, strict=True):
        span = next((span for span in spans if span.first <= entry.offset and entry.offset + entry.nbytes <= span.end), None)
        if span is None:
            hint = "derived weights cannot be put together from slices"
            raise WeightSyncError(f"tensor {entry.name!r}: expected all of it in one source", hint=hint)
        data = span.data[entry.offset - span.first : entry.offset - span.first + math.prod(entry.shape) * dtype.itemsize]
        yield entry.name, data.view(dtype).view(torch.Size(entry.shape))
