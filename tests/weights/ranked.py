"""A small model's versions, and the rows of them that each of several ranks has. Programs import it: it loads no test."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from streamrl.weights.protocol import Shard
from tests.support.wanted import host

MODEL = {"embed": ("bfloat16", (301, 8)), "norm": ("float32", (5,)), "scale": ("float32", ()), "w.up": ("bfloat16", (64, 3, 4))}
MODEL |= {"none": ("int8", (0, 4))}
ITEMS = {"bfloat16": 2, "float32": 4, "int8": 1}


def model(number: int) -> list[Shard]:
    """Version `number`: a few elements differ from one to the next."""
    shards = []
    for name, (dtype, shape) in MODEL.items():
        data = np.random.default_rng(0).integers(0, 256, int(np.prod(shape, dtype=int)) * ITEMS[dtype], dtype=np.uint8)
        data[number::97] += number
        shards.append(Shard(name=name, dtype=dtype, global_shape=shape, shape=shape, data=data))
    return shards


def rows_of(shards: Sequence[Shard], rank: int, ranks: int) -> list[Shard]:
    """A rank's rows, as FSDP2 shards them: the last ranks may have none. What has no rows is rank 0's."""
    own = []
    for shard in shards:
        if not shard.shape:
            own += [shard] if rank == 0 else []
            continue
        rows = -(-shard.shape[0] // ranks)
        low, high = (min(shard.shape[0], edge * rows) for edge in (rank, rank + 1))
        item = shard.data.nbytes // shard.shape[0] if shard.shape[0] else 0
        data = host(shard)[low * item : high * item]
        offset = (low, *(0,) * (len(shard.shape) - 1))
        own.append(msgspec.structs.replace(shard, data=data, shape=(high - low, *shard.shape[1:]), offset=offset))
    return own


LARGE = (256, 4096)


def large() -> list[Shard]:
    data = np.random.default_rng(1).integers(0, 256, 2 * LARGE[0] * LARGE[1], dtype=np.uint8)
    return [Shard(name="w", dtype="bfloat16", global_shape=LARGE, shape=LARGE, data=data)]
