"""Transport `ipc` while the device still copies: readers follow it bucket by bucket, and find out when it stops for good."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Copying, Manifest
from tests.support.errors import raises
from tests.support.wanted import slices
from tests.weights.test_ipc import Trainer, read, reader


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


class HalfCopied:
    """A version whose device has copied the first bucket only: the rest is as a slow copy would leave it for a while."""

    def __init__(self, trainer: Trainer, manifest: Manifest) -> None:
        copying = manifest.parts[0].copying
        assert isinstance(copying, Copying)
        self.ends = copying.ends
        assert self.ends == (1280, manifest.nbytes)
        self._buffer = max(trainer.ring.buffers, key=lambda one: one.used)
        self._complete = self._buffer.memory.clone()
        self._buffer.marks[1:] -= 1
        self._buffer.memory[self.ends[0] : self.ends[-1]] = 0xEE

    def copy(self) -> None:
        for number, end in enumerate(self.ends[1:], 1):
            self._buffer.memory[self.ends[number - 1] : end] = self._complete[self.ends[number - 1] : end]
            self._buffer.marks[number] += 1


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.trainers.torch.snapshot.BUCKET_BYTES", 1500)
    monkeypatch.setattr("streamrl.weights.ipc.PIECE_BYTES", 256)


@pytest.mark.usefixtures("small_buckets")
async def test_a_version_is_read_while_it_is_copied(trainer: Trainer) -> None:
    """A reader gets what is marked, and the rest as it comes; buffers that held a version before are no different."""
    for number in range(1, 5):
        manifest = await trainer.publish(number)
        slow = HalfCopied(trainer, manifest)
        reading = asyncio.ensure_future(read(reader(trainer.directory), manifest))
        parts = reader(trainer.directory).fetch(manifest, slices(manifest))
        for start in range(0, 1280, 256):
            assert (await anext(parts)).start == start
        following = asyncio.ensure_future(anext(parts))
        await asyncio.sleep(0.05)
        assert not following.done() and not reading.done(), "what is not marked is not read"
        slow.copy()
        assert b"\xee" * 100 not in bytes((await following).data)
        assert await reading == manifest.digest == trainer.digest()
        await parts.aclose()  # type: ignore[attr-defined]
        trainer.step()


@pytest.mark.usefixtures("small_buckets")
async def test_a_version_that_is_replaced_while_it_is_waited_for_is_gone(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, slots=1, patience_s=0.05)
    manifest = await trainer.publish(1)
    HalfCopied(trainer, manifest)
    reading = asyncio.ensure_future(read(reader(tmp_path), manifest))
    await asyncio.sleep(0.02)
    trainer.step()
    newer = await trainer.publish(2)
    with raises(WeightSyncError, taken_back="policy 0.1"):
        await reading
    assert await read(reader(tmp_path), newer) == newer.digest


async def test_buckets_that_no_trainer_announces_are_refused_before_a_byte_is_read(trainer: Trainer) -> None:
    manifest = await trainer.publish(1)
    (part,) = manifest.parts
    copying = part.copying
    assert isinstance(copying, Copying)
    for ends, at in (((), 0), ((part.nbytes - 1,), copying.at), ((part.nbytes,), copying.at + 4), ((part.nbytes,), 0)):
        enemy = msgspec.structs.replace(part, copying=Copying(copying.stamp, at, ends))
        with raises(WeightSyncError, expected=part.nbytes):
            await read(reader(trainer.directory), msgspec.structs.replace(manifest, parts=(enemy,)))
        with raises(WeightSyncError, expected=part.nbytes):
            async with reader(trainer.directory, sources=True).source(msgspec.structs.replace(manifest, parts=(enemy,))):
                pass
    # Marks that lie beyond the buffer's end.
    enemy = msgspec.structs.replace(part, copying=msgspec.structs.replace(copying, at=copying.at + (1 << 20)))
    with raises(WeightSyncError, offset=copying.at + (1 << 20)):
        await read(reader(trainer.directory), msgspec.structs.replace(manifest, parts=(enemy,)))
