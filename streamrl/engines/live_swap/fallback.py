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
            WeightSyncError: the spans do not hold all of a tensor, or the model refuses it.
        """
        for parameter, tensor in zip(self._twin.parameters(), parameters, strict=True):
            parameter.data = tensor
        digests: list[int] = []

        def arriving() -> Iterator[tuple[str, Tensor]]:
            # One after the other: what is put together of several ranks' rows has room of its own for as long as it is loaded.
            for name, tensor in _tensors(layout, spans, parameters[0].device):
                if verify:
                    digests.extend(tensor_digests([tensor]))
                yield from expand(name, tensor)

        named = arriving()
        try:
            self._twin.load_weights(named)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            raise WeightSyncError(f"expected tensors that fit {type(self._twin).__name__}, its load_weights says: {error}") from error
        for _ in named:  # what the model did not ask for is a part of the version all the same
            pass
        return tuple(digests)


def _tensors(layout: Layout, spans: Sequence[DeviceSpan], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    for entry, dtype in zip(layout.entries, layout.dtypes, strict=True):
        nbytes = math.prod(entry.shape) * dtype.itemsize
        data = _bytes(entry.name, spans, entry.offset, entry.offset + nbytes, device)
        yield entry.name, data.view(dtype).view(torch.Size(entry.shape))


def _bytes(name: str, spans: Sequence[DeviceSpan], first: int, end: int, device: torch.device) -> Tensor:
    """Bytes `first .. end` of the concatenation, [end - first] uint8: a view where they lie in one span, else a copy on `device`.

    Example: of bytes 64 .. 192, where one rank's rows are 0 .. 128 and the next one's 128 .. 256, each span gives 64 bytes.
    """
    found = torch.empty(0, dtype=torch.uint8, device=device)
    reached = first
    for span in spans:  # in the order of the concatenation
        low, high = max(first, span.first), min(end, span.end)
        if low >= high or low != reached:
            continue
        part = span.data[low - span.first : high - span.first]
        if (low, high) == (first, end):
            return part
        if reached == first:
            found = torch.empty(end - first, dtype=torch.uint8, device=device)
        found[low - first : high - first].copy_(part)
        reached = high
    if reached != end:
        raise WeightSyncError(
            f"tensor {name!r}: expected its bytes {first} .. {end} of the version one behind the other, got none from {reached} on",
            hint="a rank's part is missing from the version; the next one is taken afresh",
            tensor=name,
        )
    return found
