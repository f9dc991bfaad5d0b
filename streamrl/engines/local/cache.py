"""The slot cache: keys and values of the running rows, kept compact.

Letters: `S` slots, `N` key-value heads, `L` max_len, `D` head width of a key or a value, `n` active rows, `T` longest
active sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import torch
from torch import Tensor


class HeadShape(msgspec.Struct, frozen=True):
    """Key-value heads of one layer."""

    heads: int
    key_width: int
    value_width: int


class Pass(msgspec.Struct, frozen=True, kw_only=True):
    """What one forward pass does with the cache."""

    kind: Literal["prefill", "decode"]
    rows: Tensor
    """Prefill: [R] row of each joiner. Decode: unused."""
    source: Tensor
    """Prefill: [R] index into the batch whose keys and values the joiner takes (rollouts of one prompt share them)."""
    first: int = 0
    """Decode: first row of the batch; the rows are first .. first + n - 1."""
    positions: Tensor
    """Decode: [n] position of each row's token. Prefill: unused."""
    longest: int
    """T"""
    hidden: Tensor | None = None
    """Decode: [n, 1, T] additive mask in the cache's type, -inf beyond each row's position; None when all rows see all of T."""


class SlotCache:
    """Per layer K [S, N, L, Dk] and V [S, N, L, Dv]; row r of the batch is slot r."""

    def __init__(self, shapes: Sequence[HeadShape], *, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        # Rows start on multiples of 16 tokens' bytes, so that a kernel sees the same alignment in every slot.
        self.max_len = -(-max_len // 16) * 16
        self.shapes = tuple(shapes)
        self.keys = [torch.zeros(slots, s.heads, self.max_len, s.key_width, dtype=dtype, device=device) for s in shapes]
        self.values = [torch.zeros(slots, s.heads, self.max_len, s.value_width, dtype=dtype, device=device) for s in shapes]
        self._heads = {s.heads: torch.arange(s.heads, device=device) for s in shapes}
        self._rows = torch.arange(slots, device=device)
        self._slots = torch.arange(self.max_len, device=device)

    def move(self, targets: Sequence[int], sources: Sequence[int], longest: int) -> None:
        """Copy the first `longest` positions of rows `sources` to rows `targets` (disjoint)."""
        to = torch.tensor(targets, device=self._rows.device)
        of = torch.tensor(sources, device=self._rows.device)
        for tensor in (*self.keys, *self.values):
            tensor[to, :, :longest] = tensor[of, :, :longest]

    def begin_decode(self, positions: Tensor, *, first: int, longest: int, ragged: bool) -> Pass:
        """A pass with one token for each of rows first .. first + n - 1."""
        hidden = None
        if ragged:
            beyond = self._slots[:longest] > positions[:, None]
            hidden = torch.zeros(beyond.shape, dtype=self.keys[0].dtype, device=beyond.device).masked_fill_(beyond, -torch.inf)[:, None]
        none = self._rows[:0]
        return Pass(kind="decode", rows=none, source=none, first=first, positions=positions, longest=longest, hidden=hidden)

    def begin_prefill(self, rows: Sequence[int], source: Sequence[int], longest: int) -> Pass:
        """A pass over a right-padded batch of prompts of which joiner i, in row rows[i], takes number source[i]."""
        device = self._rows.device
        return Pass(
            kind="prefill",
            rows=torch.tensor(rows, device=device),
            source=torch.tensor(source, device=device),
            positions=self._rows[:0],
            longest=longest,
        )

    def write_prefill(self, layer: int, step: Pass, keys: Tensor, values: Tensor) -> None:
        """Store [m, N, T, D] of a prefill. What lies beyond a prompt's end is overwritten before it is ever read."""
        self.keys[layer][step.rows, :, : step.longest] = keys[step.source]
        self.values[layer][step.rows, :, : step.longest] = values[step.source]

    def flat_index(self, step: Pass, heads: int) -> Tensor:
        """[n * N] index of each row's and head's new position in a layer's K viewed as [S * N * L, D]."""
        rows = self._rows[step.first : step.first + len(step.positions)]
        return ((rows[:, None] * heads + self._heads[heads]) * self.max_len + step.positions[:, None]).reshape(-1)

    def write_decode(self, layer: int, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one position a row: [n, N, D] at `flat_index`."""
        shape = self.shapes[layer]
        self.keys[layer].view(-1, shape.key_width).index_copy_(0, index, keys.reshape(-1, shape.key_width))
        self.values[layer].view(-1, shape.value_width).index_copy_(0, index, values.reshape(-1, shape.value_width))

    def attend_decode(
        self, layer: int, step: Pass, queries: Tensor, *, scale: float, hidden: Tensor | None, softcap: float | None = None
    ) -> Tensor:
        """Attention of one query position a row over the cache.

        The query heads of one key-value head lie on the query axis, so no key is repeated.

        Args:
            layer: which layer.
            step: the pass.
            queries: [n, H, Dk], heads of one key-value head neighbours.
            scale: factor on the scores.
            hidden: [n, 1, T] additive mask, or None.
            softcap: scores become softcap * tanh(scores / softcap).

        Returns:
            [n, H, Dv]
        """
        shape = self.shapes[layer]
        n, num_heads, _ = queries.shape
        last = step.first + n
        # [n, N, ...] collapses to one batch axis without a copy, because rows and heads have one common stride.
        keys = self.keys[layer][step.first : last].flatten(0, 1)[:, : step.longest]
        values = self.values[layer][step.first : last].flatten(0, 1)[:, : step.longest]
        grouped = queries.reshape(n * shape.heads, num_heads // shape.heads, shape.key_width)
        if hidden is not None and shape.heads > 1:
            hidden = hidden.repeat_interleave(shape.heads, 0)
        if softcap is None and hidden is not None:
            scores = torch.baddbmm(hidden, grouped, keys.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(grouped, keys.transpose(1, 2)) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            if hidden is not None:
                scores = scores + hidden
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(n, num_heads, shape.value_width)
