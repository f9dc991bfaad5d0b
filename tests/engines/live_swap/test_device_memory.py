"""Versions in the device memory of trainers: what is put together of several ranks' rows, what is let go when a trainer dies, and what
its manifest may not say."""

from __future__ import annotations

import weakref

import msgspec
import pytest
import torch

from streamrl.engines.live_swap.messages import Prepared, Region
from streamrl.engines.live_swap.rank_digests import DigestBooks
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import CudaSource, DeviceMemory
from tests.engines.live_swap.test_recorder import Derived, Fused, check_staged, content, manifest_of, prepared, stage_of, tensors
from tests.support.errors import raises
from tests.support.wanted import filled


class Trainers:
    """Owners of device memory on this host's CPU: a buffer by handle, and by which owner it is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes: dict[bytes, torch.Tensor] = {}
        self.beside: set[str] = set()
        """Owners that still had memory open when another one's was opened."""
        self.opened: dict[bytes, weakref.ref[torch.UntypedStorage]] = {}
        monkeypatch.setattr("streamrl.tensors.cuda_ipc.open_shared", self._open)

    def _open(self, handle: bytes, device: torch.device) -> torch.Tensor:
        # What is read is a mapping of its own, as another process's is; views of it keep its storage.
        self.beside |= {name.decode().split("-")[0] for name in self.still_open()} - {handle.decode().split("-")[0]}
        opened = self.bytes[handle].clone()
        self.opened[handle] = weakref.ref(opened.untyped_storage())
        return opened

    def still_open(self) -> set[bytes]:
        return {handle for handle, opened in self.opened.items() if opened() is not None}


def whole(seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(filled(content(tensors(seed))))


def halves(trainers: Trainers) -> tuple[DeviceMemory, ...]:
    """Rows of each tensor on two ranks: each has its part of one tensor behind that of the other."""
    data, memory = whole(), list[DeviceMemory]()
    for spec in content(tensors()).tensors:
        cut = spec.shape[0] // 2 * (spec.nbytes // spec.shape[0])
        for rank, (first, end) in enumerate(((0, cut), (cut, spec.nbytes))):
            handle = f"{spec.name}-{rank}".encode()
            trainers.bytes[handle] = data[spec.offset + first : spec.offset + end]
            memory.append(DeviceMemory(handle, 0, end - first, f"rank-{rank}", spec.offset + first))
    return tuple(memory)


@pytest.mark.parametrize("kind", [Fused, Derived])
def test_rows_of_two_ranks_are_one_tensor(kind: type[Fused], monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = Trainers(monkeypatch)
    worker, swap, found = prepared(kind())
    assert found.recorded == (kind is Fused)
    digests = worker.stage(stage_of(CudaSource(halves(trainers)))).digests
    check_staged(swap, kind())
    if kind is Derived:
        # Also of the one that the model does not take.
        assert list(digests) == [int(spec.digest, 16) for spec in content(tensors()).tensors]


@pytest.mark.parametrize("left_out", ["first", "last", "between"])
def test_rows_that_are_missing_are_refused(left_out: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = list(halves(Trainers(monkeypatch)))
    del memory[{"first": 0, "last": -1, "between": 3}[left_out]]
    worker, swap, _ = prepared(Derived())
    names = [spec.name for spec in content(tensors()).tensors]
    with raises(WeightSyncError, tensor={"first": names[0], "last": names[-1], "between": names[1]}[left_out]):
        worker.stage(stage_of(CudaSource(tuple(memory))))
    assert not swap.commit(Version(0, 1), forward=0, stream=None).committed


@pytest.mark.parametrize("kind", [Fused, Derived])
def test_a_dead_trainers_buffers_are_let_go_before_its_successors_are_opened(kind: type[Fused], monkeypatch: pytest.MonkeyPatch) -> None:
    trainers = Trainers(monkeypatch)
    worker, _, _ = prepared(kind())
    number = 0
    for owner in ("first", "second", "third"):
        for buffer in ("a", "b"):  # a ring
            number += 1
            handle = f"{owner}-{buffer}".encode()
            trainers.bytes[handle] = whole(number)
            worker.stage(stage_of(CudaSource((DeviceMemory(handle, 0, len(whole()), owner, 0),)), number))
            assert {name.decode().split("-")[0] for name in trainers.still_open()} == {owner}
    assert not trainers.beside


@pytest.mark.parametrize("digest", ["", "no number", "-1", "1" * 17, "0x12"])
@pytest.mark.parametrize("words", [False, True])
def test_a_digest_that_is_none_is_refused_as_another_one_is(digest: str, words: bool) -> None:
    """It would end the engine's worker: whoever writes manifests could."""
    named = {"a": torch.arange(8, dtype=torch.float32)}
    manifest = manifest_of(named)
    books = DigestBooks(manifest.tensors, [Prepared(recorded=True, why="", regions=(Region(0, 0, 1, 8, 8),), ignored=(), took_s=0.0)])
    sums = [[int(manifest.tensors[0].words if words else manifest.tensors[0].digest, 16)]]
    assert books.check(manifest, sums, words=words) == manifest.digest
    bad = msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(manifest.tensors[0], digest=digest, words=digest),))
    with raises(WeightSyncError, tensor="a", version="0.1"):
        books.check(bad, sums, words=words)
