"""Digests that a rank of a cut model knows before its snapshot is complete: those that the snapshot itself would give."""

from typing import Any, NamedTuple

import pytest
import torch

from streamrl.tensors.digest_torch import NamedDigests
from streamrl.trainers.mesh import Mesh
from streamrl.trainers.torch.sharding import Held
from streamrl.trainers.torch.snapshot import SnapshotBytes, SnapshotRing
from streamrl.weights.protocol import Shard

CPU = torch.device("cpu")
SHAPES = {
    "model.embed_tokens.weight": (301, 12),
    "model.layers.0.mlp.experts.gate_up_proj": (4, 8, 6),
    "model.layers.0.mlp.experts.down_proj": (4, 6, 4),
    "model.layers.0.self_attn.q_proj.weight": (7, 3),
    "model.layers.0.self_attn.sink": (1, 5),
    "model.norm.weight": (12,),
    "lm_head.weight": (64, 16),
}
"""Rows that are no whole words, experts that are named one by one, and a tensor of which other ranks hold nothing."""


class Part(NamedTuple):
    """One of the ranks, without the others: nothing here asks for them."""

    mesh: Mesh
    part: int
    sharded: bool = True


def held(part: int, shards: int) -> Held:
    """Rows in float32, published in bfloat16, the head as it is."""
    mesh, parameters = Mesh(shard=shards), list[tuple[str, torch.nn.Parameter]]()
    for name, shape in SHAPES.items():
        rows = mesh.rows(shape[0], part)
        parameters.append((name, torch.nn.Parameter(torch.randn(len(rows), *shape[1:]))))
    types = {name: torch.float32 if name.startswith("lm_head") else torch.bfloat16 for name in SHAPES}
    parallel: Any = Part(mesh, part)
    made = Held(parameters, types, parallel, "qwen3_moe")
    made._shapes.update(SHAPES)  # which FSDP2's tensors say
    return made


def of_snapshot(shards: list[Shard]) -> NamedDigests:
    data = shards[0].data
    assert isinstance(data, SnapshotBytes)
    return data.snapshot.digests()


@pytest.mark.parametrize(("part", "shards"), [(part, shards) for shards in (2, 3, 8) for part in range(shards)])
def test_digests_of_rounded_rows_are_those_of_the_snapshot(part: int, shards: int) -> None:
    """And all of them: else the ring would wait for its copy and make them again, before a rank's part is handed out."""
    torch.manual_seed(part)
    model = held(part, shards)
    ring = SnapshotRing(model.published(), CPU, slots=3)
    known = model.digests()
    assert of_snapshot(ring.take(known)) is known
    assert of_snapshot(ring.take()) == known
    assert any(known.words.values()) and len(known.words) < len(known.elements)
