"""Context parallelism: ranks that share each packed row. Every rank holds its own queries, and gathers keys and values of the whole row.

The head and the log-probs are of a rank's own tokens. Log-probs, entropies and values, which are few, are gathered too, so that every rank
has the loss of whole samples; backward each takes the slope at its own tokens alone. What is summed over all ranks is then the gradient.

Letters as in `streamrl.core.context`; `K` heads of keys and values, `D` size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from streamrl.core.context import share_row
from streamrl.core.packing import MicroBatch
from streamrl.tensors.transfer import on_device

_torch: Any = dist
# torch 2.13 has new names for both, and deprecates the former ones.
_all_gather: Any = getattr(_torch, "all_gather_single", None) or _torch.all_gather_into_tensor
_reduce_scatter: Any = getattr(_torch, "reduce_scatter_single", None) or _torch.reduce_scatter_tensor


def _group(name: str) -> Any:
    groups: Any = c10d
    return groups._resolve_process_group(name)


class Context(NamedTuple):
    """The ranks that share a row, as one of them sees it."""

    place: int
    """Which of them this one is."""
    ranks: int
    group: str
    """Name of their process group."""

    def share(self, micro: MicroBatch) -> Share:
        """This rank's part of a packed row."""
        found = share_row(micro, self.place, self.ranks)
        return Share(found.micro, self, found.most, found.places)


class Share(NamedTuple):
    """What a rank computes of a micro-batch: all of it, or its part of a row."""

    micro: MicroBatch
    context: Context | None = None
    most: int = 0
    places: Any = None
    """Both as `RowShare` has them."""

    def everyones(self, *own: Tensor) -> tuple[Tensor, ...]:
        """From values [m] of the tokens that this rank predicts those [M] of all of the row's, the same bits on all of its ranks.

        The gradient goes to this rank's own: its ranks compute the same loss of what they get.
        """
        if self.context is None:
            return own
        table = torch.stack(own, 1)
        table = torch.nn.functional.pad(table, (0, 0, 0, self.most - len(table)))  # [most, values]
        gathered: Tensor = _Everyones.apply(table, self.context)  # type: ignore[no-untyped-call]
        return gathered[on_device(self.places, table.device)].unbind(1)


class _Everyones(torch.autograd.Function):
    """[most, values] of each rank to [N most, values]; backward each takes its own rows."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, context: Context) -> Tensor:
        ctx.rows = slice(context.place * len(own), (context.place + 1) * len(own))
        found = own.new_empty((context.ranks * own.shape[0], own.shape[1]))
        _all_gather(found, own.contiguous(), group=_group(context.group))
        return found

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None]:
        return slopes[0][ctx.rows], None


def gather_keys(key: Tensor, value: Tensor, order: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Keys and values of a whole row; backward their slopes are summed over the ranks, and each rank takes its own.

    Args:
        key: [1, K, 2 C, D] of this rank's two chunks.
        value: likewise.
        order: [2 N] int64, see `Cut`.
        group: name of the process group.

    Returns:
        Keys and values, both [L, K, D], of one memory.
    """
    # [2 C, 2, K, D]: what is of one position is in one place, so that chunks are sent and put in order whole.
    own = torch.stack([key[0].transpose(0, 1), value[0].transpose(0, 1)], 1).unflatten(0, (2, -1))
    keys, values = gather_chunks(own, order, group).flatten(0, 1).unbind(1)
    return keys, values


# Operators, so that torch.compile takes each as one call and looks no further.
@torch.library.custom_op("streamrl::gather_chunks", mutates_args=())
def gather_chunks(own: Tensor, order: Tensor, group: str) -> Tensor:
    """[2, C, ...] of each rank to [2 N, C, ...] in the order of the row."""
    found = own.new_empty((len(order), *own.shape[1:]))
    _all_gather(found, own.contiguous(), group=_group(group))
    return found.index_select(0, order)


@torch.library.custom_op("streamrl::scatter_chunks", mutates_args=())
def scatter_chunks(slopes: Tensor, order: Tensor, group: str) -> Tensor:
    """The sum over ranks of [2 N, C, ...] in the order of the row; [2, C, ...] of it are this rank's."""
    # Chunk order[c] of those that the ranks hold is chunk c of the row.
    held = slopes.index_select(0, torch.argsort(order))
    found = slopes.new_empty((2, *slopes.shape[1:]))
    _reduce_scatter(found, held, group=_group(group))
    return found


def _gathered_shape(own: Tensor, order: Tensor, group: str) -> Tensor:
    return own.new_empty((order.shape[0], *own.shape[1:]))


def _scattered_shape(slopes: Tensor, order: Tensor, group: str) -> Tensor:
    return slopes.new_empty((2, *slopes.shape[1:]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, order, ctx.group = inputs
    ctx.save_for_backward(order)


def _backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None, None]:
    (order,) = ctx.saved_tensors
    return scatter_chunks(slopes, order, ctx.group), None, None


gather_chunks.register_fake(_gathered_shape)
scatter_chunks.register_fake(_scattered_shape)
gather_chunks.register_autograd(_backward, setup_context=_keep)
