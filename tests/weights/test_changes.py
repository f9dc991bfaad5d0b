"""Changes between snapshots, compared where they lie: bit for bit those that the host makes of the same versions."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.errors import BusError
from streamrl.schemas.versions import Version
from streamrl.trainers.torch import snapshot
from streamrl.trainers.torch.snapshot import Published, SnapshotBytes, SnapshotRing
from streamrl.weights import changes
from streamrl.weights.bus import BusTransport
from streamrl.weights.changes import Before
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import COMPARED_BYTES, COMPARED_ELEMENTS, Shard
from streamrl.weights.ranks import RankContent
from tests.support.wanted import fetched
from tests.weights.compared import Model, compare, copied, ranges_of

CPU = torch.device("cpu")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3) as made:
        yield made


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "BLOCK_ELEMENTS", 256)
    monkeypatch.setattr(changes, "COMPARED_ELEMENTS", 1024)


@pytest.mark.usefixtures("small_blocks")
def test_blocks_are_those_of_the_host(pool: ThreadPoolExecutor) -> None:
    compare(Model(CPU, slots=3), pool)


@pytest.mark.usefixtures("small_blocks")
def test_few_elements_alone_leave_the_device(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before = Model(CPU), Before(pool)
    content = Content(model.shards(on_host=False))
    before.replace(Version(0, 1), content, ranges_of(content))
    del content
    model.parameters["few"][17, 5] += 1

    def refuse(*_: object) -> None:
        raise AssertionError("all bytes were asked for")

    monkeypatch.setattr(SnapshotBytes, "copy_to", refuse)
    content = Content(model.shards(on_host=False))
    blocks = before.replace(Version(0, 2), content, ranges_of(content))
    assert blocks is not None
    [block] = blocks
    assert len(block) < 60


@pytest.mark.usefixtures("small_blocks")
def test_rows_of_a_rank_are_compared_as_such(pool: ThreadPoolExecutor) -> None:
    whole = torch.randn(40, 100).bfloat16()
    held = whole[13:31].clone()
    ring = SnapshotRing([Published("w", held, torch.bfloat16, (40, 100), (13, 0))], CPU, slots=3)
    device, host = Before(pool), Before(pool)
    for number in (1, 2, 3):
        content = RankContent(ring.take())
        copy = RankContent([copied(shard) for shard in ring.take()])
        assert device.replace(Version(0, number), content, ranges_of(content)) == host.replace(Version(0, number), copy, ranges_of(copy))
        held[number, 5] += 1


def test_there_is_nothing_to_compare_with_before_the_first_an_older_or_another_model(pool: ThreadPoolExecutor) -> None:
    model, before = Model(CPU, slots=3), Before(pool)

    def replace(number: int, shards: Sequence[Shard]) -> list[bytes] | None:
        content = Content(shards)
        return before.replace(Version(0, number), content, ranges_of(content))

    assert replace(2, model.shards(on_host=False)) is None
    assert replace(2, model.shards(on_host=False)) is None
    assert replace(1, model.shards(on_host=False)) is None
    assert replace(3, model.shards(on_host=False)) == []
    assert replace(4, model.shards(on_host=True)) is None, "the one before lay on the device"
    assert replace(5, model.shards(on_host=False)) is None, "the one before lay on the host"
    before.forget()
    assert before.version is None and replace(6, model.shards(on_host=False)) is None
    # Another ring may be on another device: the host compares.
    model.step()
    found = replace(7, model.shards(on_host=False))
    other = Model(CPU)
    other.step()
    other.parameters["few"][1, 1] += 1
    assert found and len(replace(8, other.shards(on_host=False)) or ()) == 1


class Made(TorchDispatchMode):
    """Bytes of all tensors that operations make."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.nbytes += out.nbytes
        return out


@pytest.mark.parametrize("part", [0.0, 0.01, 0.2499, 0.26, 1.0])
@pytest.mark.parametrize("count", [50_000, 2048, 1000])
def test_a_comparison_takes_the_room_that_is_reckoned_with(part: float, count: int) -> None:
    """The positions of all elements would take more than all else together."""
    parameter = torch.zeros(count)
    ring = SnapshotRing([("w", parameter)], CPU, slots=2)
    (old,) = ring.take()
    parameter[torch.arange(count) % 10_000 < part * 10_000] = 1  # bits of 0 and 1
    changed = int((parameter == 1).sum())
    (new,) = ring.take()
    assert isinstance(new.data, SnapshotBytes) and isinstance(old.data, SnapshotBytes)
    with Made() as made:
        found = new.data.changes(old.data, 4, 0, count)
    assert made.nbytes <= COMPARED_BYTES // COMPARED_ELEMENTS * count + 8192
    assert (found is None) == (4 * changed > count)
    if found is not None:
        np.testing.assert_array_equal(found.positions, np.flatnonzero(parameter.numpy()))


@pytest.mark.usefixtures("small_blocks")
def test_one_part_is_compared_at_a_time(pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each thread would take as much of the device."""
    model, before = Model(CPU, slots=2), Before(pool)
    before.replace(Version(0, 1), content := Content(model.shards(on_host=False)), ranges_of(content))
    del content
    inside, most, bits, count = 0, 0, snapshot._bits, snapshot._count
    flags: list[weakref.ref[torch.Tensor]] = []

    def counted(found: torch.Tensor) -> int:
        flags.append(weakref.ref(found))
        return count(found)

    def slow(*args: Any) -> torch.Tensor:
        nonlocal inside, most
        inside += 1
        assert all(one() is None for one in flags), "the comparison before still holds its room"
        most = max(most, inside)
        time.sleep(0.01)
        inside -= 1
        return bits(*args)

    monkeypatch.setattr(snapshot, "_bits", slow)
    monkeypatch.setattr(snapshot, "_count", counted)
    model.step()
    before.replace(Version(0, 2), content := Content(model.shards(on_host=False)), ranges_of(content))
    assert most == 1 and len(flags) > 1


async def test_a_follower_gets_every_version_from_the_changes(memory_bus) -> None:
    """Two buffers are enough: the version before is held while the next one is published, and then let go."""
    publisher, follower = (BusTransport(memory_bus.blobs, run="r", policy="p", anchor_every=3, threads=2) for _ in range(2))
    model = Model(CPU, slots=2)
    kinds = []
    for number in range(1, 8):
        copies = {name: parameter.clone() for name, parameter in model.parameters.items()}
        manifest = await publisher.publish(Version(0, number), model.ring.shards())
        kinds.append(manifest.kind)
        model.step()
        for reader in (follower, BusTransport(memory_bus.blobs, run="r", policy="p", anchor_every=3, threads=1)):
            data = await fetched(reader, manifest)
            for spec in manifest.tensors:
                wanted = copies[spec.name].reshape(-1).view(torch.uint8).numpy()
                np.testing.assert_array_equal(data[spec.offset : spec.offset + spec.nbytes], wanted)
    assert kinds[0] == "full" and "delta" in kinds and len(model.ring.buffers) == 2


async def test_a_version_that_could_not_be_stored_is_not_compared_with(memory_bus, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = BusTransport(memory_bus.blobs, run="r", policy="p", anchor_every=16, threads=1)
    model = Model(CPU, slots=3)  # what the error's traceback holds is one of them
    await publisher.publish(Version(0, 1), model.ring.shards())
    put = type(memory_bus.blobs).put

    async def refused(*_: object, **__: object) -> None:
        raise BusError("the bus is full")

    monkeypatch.setattr(type(memory_bus.blobs), "put", refused)
    model.step()
    with pytest.raises(BusError):
        await publisher.publish(Version(0, 2), model.ring.shards())
    monkeypatch.setattr(type(memory_bus.blobs), "put", put)
    assert (await publisher.publish(Version(0, 3), model.ring.shards())).kind == "full"
