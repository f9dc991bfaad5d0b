"""Versions that lie in the files of several trainer ranks: what of them a rank of an engine reads, and what it refuses."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from torch import Tensor

from streamrl.engines.live_swap import staging
from streamrl.engines.live_swap.images import MappedVersion
from streamrl.engines.live_swap.side import Side
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import FilePiece, FileSource, Shard
from streamrl.weights.shm import ShmTransport
from tests.engines.live_swap.test_recorder import Derived, Fused, check_staged, content, prepared, shard, stage_of, tensors
from tests.support.errors import raises
from tests.support.wanted import filled


def rows_of(named: dict[str, Tensor], rank: int, ranks: int) -> list[Shard]:
    found = []
    for name, tensor in named.items():
        each = -(-len(tensor) // ranks)
        first, end = (min(len(tensor), edge * each) for edge in (rank, rank + 1))
        one = shard(name, tensor[first:end])
        found.append(msgspec.structs.replace(one, global_shape=tuple(tensor.shape), offset=(first, *(0,) * (tensor.ndim - 1))))
    return found


async def published(named: dict[str, Tensor], directory: Path, ranks: int) -> tuple[FileSource, bytes]:
    """The files of so many ranks, and the version's bytes."""
    transports = [ShmTransport(run="r", policy="p", directory=directory, rank=rank, part_bytes=100) for rank in range(ranks)]
    made = [await one.contribute(Version(0, 1), iter(rows_of(named, rank, ranks))) for rank, one in enumerate(transports)]
    manifest = transports[0].merge(made)
    async with ShmTransport(run="r", policy="p", directory=directory).source(manifest) as source:
        pass
    return source, filled(content(named)).tobytes()


@pytest.mark.parametrize("ranks", [2, 3])
async def test_the_files_of_ranks_are_one_version(tmp_path: Path, ranks: int) -> None:
    source, whole = await published(tensors(), tmp_path, ranks)
    assert len(source.more) == ranks - 1
    version = MappedVersion(source, len(whole))
    assert version.bytes(0, len(whole)).tobytes() == whole
    chosen = random.Random(0)
    for _ in range(300):
        first = chosen.randrange(len(whole))
        end = chosen.randrange(first, len(whole) + 1)
        assert version.bytes(first, end - first).tobytes() == whole[first:end]


@pytest.mark.parametrize("kind", [Fused, Derived])
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_reads_what_it_needs_of_each_file(
    kind: type[Fused], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tensors()
    source, whole = await published(named, tmp_path, 3)
    read = 0
    load = Side.load

    def counted(side: Side, slot: int, runs) -> None:
        nonlocal read
        kept = list(runs)
        read += sum(data.numel() for _, data in kept)
        load(side, slot, kept)

    monkeypatch.setattr(Side, "load", counted)
    monkeypatch.setattr(staging, "RUN_GAP_BYTES", 0)
    worker, swap, known = prepared(kind(rank))
    worker.stage(stage_of(source))
    check_staged(swap, kind(rank))
    if kind is Fused:
        # Half of what is cut by rows; columns are read with what lies between them, but for their ends.
        assert sum(region.rows * region.cols * 4 for region in known.regions) <= read <= len(whole) - 2 * 96 - 12


@pytest.mark.parametrize(
    "pieces",
    [
        (FilePiece(2, 0, 0, 10),),
        (FilePiece(-1, 0, 0, 10),),
        (FilePiece(0, -1, 0, 10),),
        (FilePiece(0, 95, 0, 10),),
        (FilePiece(0, 0, 0, -1),),
        (FilePiece(0, 0, -5, 10),),
        (FilePiece(0, 0, 0, 10), FilePiece(1, 0, 9, 10)),
        (FilePiece(0, 0, 0, 10), FilePiece(1, 0, 145, 10)),
    ],
)
def test_pieces_that_do_not_fit_the_files_are_refused(pieces: tuple[FilePiece, ...], tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_bytes(bytes(100))
    MappedVersion(FileSource(str(tmp_path / "one"), (str(tmp_path / "two"),), (FilePiece(0, 0, 0, 100), FilePiece(1, 50, 100, 50))), 150)
    with pytest.raises(WeightSyncError, match="version of 150 bytes"):
        MappedVersion(FileSource(str(tmp_path / "one"), (str(tmp_path / "two"),), pieces), 150)


def test_a_file_that_is_gone_or_too_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(WeightSyncError, match="cannot read the version"):
        MappedVersion(FileSource(str(tmp_path / "gone")), 1)
    with pytest.raises(WeightSyncError, match="version of 1 bytes"):
        MappedVersion(FileSource(str(tmp_path / "empty")), 1)


async def test_a_version_is_gone_when_the_file_of_one_rank_is(tmp_path: Path) -> None:
    transports = [ShmTransport(run="r", policy="p", directory=tmp_path, rank=rank) for rank in range(2)]
    made = [await one.contribute(Version(0, 1), iter(rows_of(tensors(), rank, 2))) for rank, one in enumerate(transports)]
    manifest = transports[0].merge(made)
    (tmp_path / manifest.parts[-1].location).unlink()
    with raises(WeightSyncError, version="0.1"):
        async with transports[0].source(manifest):
            pass
