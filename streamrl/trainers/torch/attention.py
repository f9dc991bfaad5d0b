"""Attention over packed rows: several samples stand one behind another in a row, each attends to itself alone.

Letters: `L` positions of a row, `S` samples in it, `N` heads, `K` heads of keys and values, `D` size of a head.

```text
row of L = 8     a a a b b b b .      cu_seqlens = [0, 3, 7, 8]: sample s takes the columns cu_seqlens[s] to cu_seqlens[s + 1] - 1
```

On a GPU, in bfloat16, this is torch's `varlen_attn` (FlashAttention 2, arXiv 2307.08691); elsewhere scaled dot products, one sample after
another. transformers calls it by the name `PACKED`. Where ranks share a row (`streamrl.core.context`), a rank has the queries of two chunks
of it, each with bounds of its own, and looks at keys of the whole row.
"""

from __future__ import annotations

import inspect
import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from streamrl.trainers.torch.context import gather_keys

PACKED = "streamrl_packed"


def register() -> None:
    """Make `PACKED` known to transformers, as a value of `attn_implementation`."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)


def attention_mask(tree_RL: Tensor, branch_RL: Tensor) -> Tensor:
    """Which keys each query may look at: [R, 1, L, L] bool, by the rule of `streamrl.core.packing`."""
    length = tree_RL.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=tree_RL.device).tril()
    same_tree = tree_RL[:, :, None] == tree_RL[:, None, :]
    on_path = (branch_RL[:, None, :] == 0) | (branch_RL[:, :, None] == branch_RL[:, None, :])
    return (causal & same_tree & on_path)[:, None]


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int = 0,
    max_length_k: int = 0,
    context_order: Tensor | None = None,
    context_group: str = "",
    sliding_window: int | None = None,
    windows: list[int | None] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of a row.

    Args:
        module: of transformers; not looked at.
        query: [1, N, L, D]; [R, N, L, D] without `cu_seq_lens_q`.
        key: [1, K, L, D]; N is a multiple of K.
        value: [1, K, L, D].
        attention_mask: must say nothing that `cu_seq_lens_q` does not; not looked at.
        scaling: of the dot products; None: 1 / sqrt(D).
        cu_seq_lens_q: [S + 1] int32, where each sample begins, and L; None: every row is one sample. With `context_order` [2, B], the
            bounds of two chunks of queries, see `Cut`.
        cu_seq_lens_k: the same; with `context_order` [2, B], of the keys that these look at.
        max_length_q: no sample is longer, nor a piece of one in a chunk.
        max_length_k: no sample is longer.
        context_order: [2 N] int64, the chunks of a row that ranks share, see `Cut`; None: the row is this rank's alone.
        context_group: name of the process group of these ranks.
        sliding_window: a query looks at so many keys, its own among them; None: at all that are before it. Not where ranks share a row.
        windows: gets `sliding_window`, so that one can see what each layer hands over; None: nobody looks.

    Returns:
        [1, L, N, D], and no attention weights; of a row that is shared this rank's columns.
    """
    if windows is not None:
        windows.append(sliding_window)
    if cu_seq_lens_q is None:
        return _causal(query, key, value, scaling, sliding_window).transpose(1, 2), None
    flash = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    if context_order is not None:
        assert cu_seq_lens_k is not None and sliding_window is None
        keys, values = gather_keys(key, value, context_order, context_group)
        chunks = query[0].transpose(0, 1).chunk(2)
        longest = (max_length_q, max_length_k)
        attend = by_flash if flash else by_piece
        found = [attend(own, keys, values, cu_seq_lens_q[i], cu_seq_lens_k[i], longest, scaling) for i, own in enumerate(chunks)]
        return torch.cat(found)[None], None
    if flash and (sliding_window is None or _takes("window_size")):
        return _varlen(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)[None], None
    return _by_sample(query, key, value, cu_seq_lens_q, scaling, sliding_window).transpose(1, 2), None


def _each_sample(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scaling: float | None, window: int | None) -> Tensor:
    spans = [(a, b) for a, b in itertools.pairwise(cu_seqlens.tolist()) if a < b]
    return torch.cat([_causal(query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], scaling, window) for a, b in spans], 2)


# Not compiled: the samples' lengths, which are numbers there, would be compiled in.
_by_sample: Any = torch.compiler.disable(_each_sample)


def _each_piece(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, longest: tuple[int, int], scaling: float | None
) -> Tensor:
    """As `by_flash`: the last query of a piece looks at all of its keys, the one before at one less."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
    found: list[Tensor] = []
    pieces = zip(itertools.pairwise(starts.tolist()), itertools.pairwise(key_starts.tolist()), strict=True)
    for (first, last), (first_key, last_key) in pieces:
        for a in range(first, last, _QUERIES):  # some at a time, since the mask is written out
            b = min(a + _QUERIES, last)
            end = last_key - (last - b)
            mask = torch.ones(b - a, end - first_key, dtype=torch.bool, device=query.device).tril(end - first_key - (b - a))
            k, v = key[:, :, first_key:end], value[:, :, first_key:end]
            grouped = query.shape[1] != key.shape[1]
            attend = torch.nn.functional.scaled_dot_product_attention
            found.append(attend(query[:, :, a:b], k, v, attn_mask=mask, scale=scaling, enable_gqa=grouped))
    return torch.cat(found, 2)[0].transpose(0, 1)


_QUERIES = 1024
by_piece: Any = torch.compiler.disable(_each_piece)


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
    grouped, length = query.shape[1] != key.shape[1], query.shape[2]
    attend = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, scale=scaling, enable_gqa=grouped)
    if window is None or length <= window:
        return attend(is_causal=True)
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return attend(attn_mask=mask)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, longest: int, scaling: float | None, window: int | None
) -> Tensor:
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return by_flash(query, key, value, cu_seqlens, cu_seqlens, (longest, longest), scaling, window)


def by_flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    key_starts: Tensor,
    longest: tuple[int, int],
    scaling: float | None,
    window: int | None = None,
) -> Tensor:
    """Queries [L, N, D] of pieces that begin at `starts`, of their keys [L', K, D] at `key_starts`; the last query sees the last key.

    Of `window` keys, its own among them, where that is given: torch must take `window_size` then.
    """
    from torch.nn.attention import varlen

    before = -1 if window is None else window - 1
    options: dict[str, Any] = {"window_size": (before, 0)} if _takes("window_size") else {"is_causal": True}
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and _takes("enable_gqa"):
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    if scaling is not None and _takes("scale"):
        options["scale"] = scaling
    elif scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    found: Any = varlen.varlen_attn(query, key, value, starts, key_starts, *longest, **options)
    return found


@torch.compiler.assume_constant_result  # type: ignore[no-untyped-call]
def _takes(option: str) -> bool:
    """Whether `varlen_attn` of this torch does: `is_causal` became `window_size`, `enable_gqa` and `scale` came later."""
    from torch.nn.attention import varlen

    return option in inspect.signature(varlen.varlen_attn).parameters
