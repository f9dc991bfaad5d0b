"""Context parallelism: a packed row that several ranks share. Pure, numpy only.

Letters: `L` positions of the row, `N` ranks that share it, `C = L / 2N` positions of a chunk, `S` samples, `M` predicted tokens of the row.

The row is cut into 2 N chunks, and each rank takes two, so that all have the same number of positions and one shape is compiled. A query at
position p of its sample looks at p + 1 keys. Chunks are paired by that: the one with most keys with the one with fewest, and so on. Of one
sample that fills the row, rank r has chunks r and 2 N - 1 - r, and all ranks have the same work; of many samples two ranks differ by one
chunk's work at most.

```text
L = 16, N = 2, one sample:   chunk       0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3
                             rank        0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0
```
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.core.packing import Cut, Indices, MicroBatch


class RowShare(NamedTuple):
    """What one rank has of a row."""

    micro: MicroBatch
    """Its positions, chunk by chunk, [1, L / N]; `source` counts in these, `target` are the tokens that they predict, [m]."""
    most: int
    """Most tokens that a rank predicts, one at least."""
    places: Indices
    """[M] where the row's tokens stand when each rank's are laid out behind the former's, `most` for each."""


def pair_chunks(starts: npt.NDArray[np.int32], ranks: int) -> Indices:
    """Which two chunks of a row each rank takes, [N, 2], the first one first.

    Args:
        starts: [S + 1] columns at which samples and padding begin, then L, a multiple of 2 N.
        ranks: N.

        >>> pair_chunks(np.array([0, 16], np.int32), 2).tolist()
        [[0, 3], [1, 2]]
        >>> pair_chunks(np.array([0, 12, 16], np.int32), 2).tolist()
        [[0, 2], [1, 3]]
    """
    length = int(starts[-1])
    columns = np.arange(length)
    # Of each column the sample that it is in: the last one that begins at or before it. Example: starts 0 3 3 5 give 0 0 0 2 2.
    begins = starts[np.searchsorted(starts, columns, side="right") - 1]
    keys = (columns - begins + 1).reshape(2 * ranks, -1).sum(1)
    order = np.argsort(keys, kind="stable")
    return np.sort(np.stack([order[:ranks], order[: ranks - 1 : -1]], 1), 1)


def share_row(micro: MicroBatch, place: int, ranks: int) -> RowShare:
    """What rank `place` of `ranks` has of a micro-batch that is one packed row of a length that 2 N divides."""
    assert micro.starts is not None
    starts, length = micro.starts, micro.inputs.shape[1]
    chunk = length // (2 * ranks)
    pairs = pair_chunks(starts, ranks)
    # Chunk c of the row is number order[c] of those that all ranks hold, rank by rank: pairs [[0, 3], [1, 2]] give 0 2 3 1.
    order = np.argsort(pairs.reshape(-1))
    columns = (pairs[place][:, None] * chunk + np.arange(chunk)).reshape(-1)
    # Of each predicted token the rank that holds its state, and where in that rank's 2 C positions.
    number = order[micro.source // chunk]
    owner, local = number // 2, number % 2 * chunk + micro.source % chunk
    most = max(1, int(np.bincount(owner, minlength=ranks).max()))
    places = np.zeros(len(owner), np.int64)
    for rank in range(ranks):
        found = np.flatnonzero(owner == rank)
        places[found] = rank * most + np.arange(len(found))
    own = owner == place
    queries, keys = zip(*(_bounds(starts, int(first) * chunk, chunk) for first in pairs[place]), strict=True)
    cut = Cut(queries=np.stack(queries), keys=np.stack(keys), order=order)
    held = replace(
        micro,
        inputs=micro.inputs[:, columns],
        positions=micro.positions[:, columns],
        tree=micro.tree[:, columns],
        branch=micro.branch[:, columns],
        copies=micro.copies[:, columns],
        fed=micro.fed[:, columns],
        source=local[own],
        target=micro.target[own],
        cut=cut,
    )
    return RowShare(held, most, places)


def _bounds(starts: npt.NDArray[np.int32], first: int, chunk: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Where the pieces of a chunk's queries begin, and those of the row's keys that they look at; both [2 S + 1], ends included.

    Piece s has the queries of sample s within the chunk, and its keys up to the chunk's end, so that the last query's own key is the last.
    Keys behind the chunk are pieces without queries: so every key is in one piece, and its gradient is written, if only as 0.

    Example: samples begin at 0 and 5 in a row of 8, the chunk is columns 2 to 3. Queries 0 2 2 2 2: sample 0 has both. Keys 0 4 4 5 8:
    sample 0 has four, sample 1 none; what is left of sample 0, and sample 1, have no queries.
    """
    last = first + chunk
    queries = np.concatenate([np.clip(starts, first, last) - first, np.full(len(starts) - 1, chunk)])
    keys = np.concatenate([np.minimum(starts, last), np.maximum(starts, last)[1:]])
    return queries.astype(np.int32), keys.astype(np.int32)
