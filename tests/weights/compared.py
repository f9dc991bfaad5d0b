"""A model whose versions are compared where they lie, and beside that on the host."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from streamrl.schemas.versions import Version
from streamrl.trainers.torch.snapshot import SnapshotRing
from streamrl.weights.changes import Before, Range
from streamrl.weights.manifest import ITEM_BYTES, Content
from streamrl.weights.protocol import Shard
from streamrl.weights.ranks import RankContent


def copied(shard: Shard) -> Shard:
    """The same on the host."""
    return Shard(
        name=shard.name, dtype=shard.dtype, global_shape=shard.global_shape, offset=shard.offset, shape=shard.shape, data=shard.host()
    )


class Model:
    """Parameters of several types, of which each step changes few, many or all elements."""

    def __init__(self, device: torch.device, *, slots: int = 2) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = {
            "few": torch.randn(300, 70, generator=generator).bfloat16(),
            "half": torch.randn(4001, generator=generator),
            "many": torch.randn(90, 11, generator=generator).bfloat16(),
            "all": torch.randn(700, generator=generator).double(),
            "none": torch.randn(50, generator=generator),
            "flags": torch.randint(0, 200, (999,), generator=generator, dtype=torch.uint8),
            "empty": torch.zeros(0, 4),
            "scalar": torch.randn((), generator=generator),
        }
        self.parameters = {name: parameter.to(device) for name, parameter in self.parameters.items()}
        self.ring = SnapshotRing(list(self.parameters.items()), device, slots=slots)
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        self.ring.settle()
        generator = torch.Generator().manual_seed(self._steps)
        for name, part in {"few": 0.01, "half": 0.45, "many": 0.7, "all": 1.0, "flags": 0.2, "scalar": 1.0}.items():
            parameter = self.parameters[name]
            chosen = (torch.rand(parameter.shape, generator=generator) < part).to(parameter.device)
            changed = parameter * 1.0625 if parameter.is_floating_point() else parameter + 3
            parameter.copy_(torch.where(chosen, changed.to(parameter.dtype), parameter))
        self.parameters["few"][0, :3] = torch.tensor([float("nan"), -0.0, float("inf")])

    def shards(self, *, on_host: bool) -> list[Shard]:
        shards = self.ring.take()
        return [copied(shard) for shard in shards] if on_host else shards


def ranges_of(content: Content | RankContent) -> list[Range]:
    if isinstance(content, Content):
        items = [(spec, ITEM_BYTES[spec.dtype], spec.offset) for spec in content.tensors]
        return [Range(spec.name, spec.dtype, item, 0, spec.nbytes // item, start) for spec, item, start in items]
    found = zip(content.slices, content.starts, strict=True)
    return [Range(one.name, one.dtype, ITEM_BYTES[one.dtype], one.first, one.count, start) for one, start in found]


def compare(model: Model, pool: ThreadPoolExecutor) -> None:
    """Versions that are compared on the device, and the same on the host."""
    device, host = Before(pool), Before(pool)
    made = 0
    for number in range(1, 6):
        content, copy = Content(model.shards(on_host=False)), Content(model.shards(on_host=True))
        assert content.devices() is not None and copy.devices() is None
        blocks = device.replace(Version(0, number), content, ranges_of(content))
        assert blocks == host.replace(Version(0, number), copy, ranges_of(copy))
        assert (blocks is None) == (number == 1)
        made += len(blocks or ())
        model.step()
    assert made > 4 * 5
    assert len(device.bytes) == 0
