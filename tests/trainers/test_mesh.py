"""How ranks share a model: arithmetic."""

import itertools
import math

import numpy as np
import pytest
import torch
from msgspec import UNSET

from streamrl.config.tree import TrainerConfig
from streamrl.tensors.digest import MASK, slice_digest, tensor_digest
from streamrl.trainers.mesh import Mesh, gathers_once, mesh_of, trained_on


def test_ranks_are_copies_times_parts_and_neighbours_share_rows() -> None:
    mesh = mesh_of(TrainerConfig(ranks=6, shards=3))
    assert (mesh.replicate, mesh.shard, mesh.ranks) == (2, 3, 6)
    assert [mesh.place(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh_of(TrainerConfig(ranks=2)) == Mesh(replicate=2, shard=1)
    mesh = mesh_of(TrainerConfig(ranks=6, shards=2, context=3))
    assert (mesh.replicate, mesh.shard, mesh.context) == (3, 2, 3)
    assert [mesh.share(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [mesh.whole(length) for length in (1, 6, 7)] == [6, 6, 12]
    assert [Mesh(replicate=2).whole(length) for length in (1, 7)] == [1, 7]
    assert [trained_on(TrainerConfig(ranks=2, context=count)).context for count in (1, 2)] == [UNSET, 2]


def test_layers_stay_gathered_where_that_is_a_quarter_of_the_memory() -> None:
    assert [gathers_once("auto", 100, memory) for memory in (400, 399, 0)] == [True, False, True]
    assert gathers_once("step", 100, 1) and not any(gathers_once("micro_batch", 100, memory) for memory in (400, 0))


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for shard, rows in itertools.product((1, 2, 3, 4, 7), (0, 1, 2, 5, 8)):
        chunks = [chunk.tolist() for chunk in torch.arange(rows).chunk(shard)] if rows else []
        expected = chunks + [[]] * (shard - len(chunks))
        assert [list(Mesh(shard=shard).rows(rows, part)) for part in range(shard)] == expected


@pytest.mark.parametrize("shape", [(5, 3), (4,), (1, 2), (0, 3), (3, 2, 2)])
def test_slices_cover_a_tensor_and_their_digests_add_up(shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 256, 4 * math.prod(shape), np.uint8)
    total, first = 0, 0
    for part in range(4):
        offset, size = Mesh(shard=4).slice(shape, part)
        nbytes = 4 * math.prod(size)
        total += slice_digest(data[first : first + nbytes], 4, shape, offset, size)
        first += nbytes
    assert (first, total & MASK) == (data.nbytes, tensor_digest(data, 4))
