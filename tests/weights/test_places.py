"""Places of what several ranks stored that are no version: refused by every transport."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from streamrl.bus.memory.bus import MemoryBus
from streamrl.config.tree import WeightsConfig
from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest, PartRef, Piece, TensorSpec
from streamrl.weights.ranks import check_places, merge
from tests.weights.test_ranks import contribution, model, rows_of, whole
from tests.weights.test_slices import Ranks, announced, read, v


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "expected a piece with byte .*, of tensor 'w.up', got none"),
        (lambda p: p[1:], "expected a piece with byte 0, of tensor 'embed', got none"),
        (lambda p: [p[0], msgspec.structs.replace(p[1], nbytes=p[1].nbytes - 2), *p[2:]], "expected a piece with byte .*, got none"),
        (lambda p: [p[0], msgspec.structs.replace(p[1], start=p[1].start - 2), *p[2:]], "expected pieces apart|expected a piece with"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], start=p[0].start)], "expected pieces apart from each other"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], start=1 << 40)], "expected pieces apart from each other within its"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], start=-2)], "expected pieces apart from each other within its"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], stored=1 << 40)], "expected pieces in order within its"),
        (lambda p: [p[0], msgspec.structs.replace(p[1], stored=p[0].stored), *p[2:]], "expected pieces in order within its"),
        (lambda p: [msgspec.structs.replace(p[0], nbytes=0), *p[1:]], "expected pieces in order within its"),
    ],
)
async def test_places_that_are_no_version_are_refused_by_every_transport(tmp_path: Path, change, said: str) -> None:
    bus = MemoryBus("r")
    for config in (WeightsConfig(transport="shm", keep=0), WeightsConfig(transport="bus", keep=0, anchor_every=1)):
        ranks = Ranks(bus, tmp_path, config)
        await ranks.offer(1)
        await ranks.close()
        good = await announced(bus)
        check_places(good)
        pieces = tuple(change(list(good.pieces)))
        links = {name: tuple(msgspec.structs.replace(link, pieces=pieces) for link in links) for name, links in good.links.items()}
        bad = msgspec.structs.replace(good, pieces=pieces, links=links)
        assert await read(bus, tmp_path, config, good) == whole(1)
        with pytest.raises(WeightSyncError, match=rf"manifest of policy 0\.1: ({said})"):
            await read(bus, tmp_path, config, bad)


async def test_parts_that_are_missing_or_twice_are_refused(tmp_path: Path) -> None:
    made = [contribution(rows_of(model(1), rank, 2), 100, {}, str(rank)) for rank in range(2)]
    good = merge(made)
    check_places(good)
    for parts, said in (
        (good.parts[1:], "expected a part at byte 0"),
        (good.parts[:-1], "expected pieces in order within its"),
        ((*good.parts, good.parts[-1]), "expected a part at byte"),
        ((*good.parts[:-1], msgspec.structs.replace(good.parts[-1], nbytes=-1)), "expected a part at byte"),
    ):
        with pytest.raises(WeightSyncError, match=said):
            check_places(msgspec.structs.replace(good, parts=tuple(parts)))


def test_padding_may_belong_to_no_piece() -> None:
    tensors = (TensorSpec("a", "int8", (5,), 0, 5, ""), TensorSpec("b", "int8", (3,), 64, 3, ""))
    manifest = Manifest(
        run="r", policy="p", version=v(1), tensors=tensors, parts=(PartRef("x", 0, 8),), transport="shm", digest="", nbytes=67,
        pieces=(Piece(0, 0, 5), Piece(5, 64, 3)),
    )  # fmt: skip
    check_places(manifest)
