"""Several trainer ranks publish one version: what they store is the version that one process would have published, or it is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.bus.memory import MemoryBus
from streamrl.engines.live_swap.images import MappedVersion
from streamrl.errors import WeightSyncError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Copying, Link, Manifest, PartRef
from streamrl.tensors.names import named
from streamrl.weights.bus import BusTransport
from streamrl.weights.manifest import Content
from streamrl.weights.merging import Merger
from streamrl.weights.protocol import Shard
from streamrl.weights.ranks import RankContent, check_places, merge, placed
from streamrl.weights.shm import ShmTransport
from tests.support.errors import raises
from tests.support.wanted import fetched, filled
from tests.weights.ranked import ITEMS, model, rows_of


def whole(number: int) -> bytes:
    return filled(Content(model(number))).tobytes()


def contribution(shards: Sequence[Shard], limit: int, stored: dict[str, bytes], name: str) -> Contribution:
    """What a rank stores, with its bytes in `stored`."""
    content = RankContent(shards)
    parts = []
    for start in range(0, content.nbytes, limit):
        out = np.empty(min(limit, content.nbytes - start), np.uint8)
        content.fill(start, out)
        parts.append(PartRef(location=f"{name}/{start}", offset=start, nbytes=len(out)))
        stored[f"{name}/{start}"] = out.tobytes()
    links = (Link(version=Version(0, 1), parts=tuple(parts)),) if parts else ()
    return Contribution(run="r", policy="policy", version=Version(0, 1), slices=content.slices, links=links, transport="bus")


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.dictionaries(
        st.text("abc.", min_size=1, max_size=4),
        st.tuples(st.sampled_from(sorted(ITEMS)), st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple)),
        min_size=1,
        max_size=6,
    ).filter(lambda model: any(np.prod(shape) for _, shape in model.values())),
    ranks=st.integers(1, 5),
    limit=st.integers(1, 150),
)
def test_what_ranks_store_is_what_one_process_would_have_published(tensors, ranks, limit):
    rng = np.random.default_rng(ranks)
    shards = []
    for name, (dtype, shape) in tensors.items():
        data = rng.integers(0, 256, int(np.prod(shape)) * ITEMS[dtype], dtype=np.uint8)
        shards.append(Shard(name=name, dtype=dtype, global_shape=shape, shape=shape, data=data))
    content = Content(shards)
    stored: dict[str, bytes] = {}
    manifest = merge([contribution(rows_of(shards, rank, ranks), limit, stored, str(rank)) for rank in range(ranks)])
    assert (manifest.digest, manifest.nbytes) == (content.digest, content.nbytes)
    for spec, alone in zip(manifest.tensors, content.tensors, strict=True):
        assert msgspec.structs.replace(spec, words=alone.words) == alone
        assert spec.words in ("", alone.words)
        # Ranks that have no rows of a tensor cut no word of it.
        cuts = spec.nbytes and spec.nbytes // spec.shape[0] % 8 and min(ranks, spec.shape[0]) > 1
        assert cuts or spec.words == alone.words
    got = np.zeros(content.nbytes, np.uint8)
    taken = np.zeros(content.nbytes, int)
    for part in manifest.parts:
        for piece in placed(manifest.pieces, part.offset, part.nbytes):
            first = piece.stored - part.offset
            got[piece.start : piece.start + piece.nbytes] = np.frombuffer(stored[part.location], np.uint8)[first : first + piece.nbytes]
            taken[piece.start : piece.start + piece.nbytes] += 1
    np.testing.assert_array_equal(got, filled(content))
    assert taken.max() == 1


def experts_of(experts: int, layers: int, ranks: int) -> list[Contribution]:
    """Whole experts by rank, of layers whose norm is cut; numbers of one and of several digits."""
    made = []
    for rank in range(ranks):
        own: list[Shard] = []
        for layer in range(layers):
            norm = Shard(
                name=f"l.{layer}.norm", dtype="bfloat16", global_shape=(ranks,), shape=(1,), offset=(rank,), data=np.zeros(2, np.uint8)
            )
            own.append(norm)
            for name, shape in (("gate_up_proj", (experts, 6, 5)), ("down_proj", (experts, 5, 3))):
                rows = range(experts * rank // ranks, experts * (rank + 1) // ranks)
                for one in named("qwen3_moe", f"l.{layer}.mlp.experts.{name}", shape, rows):
                    data = np.zeros(2 * one.numel, np.uint8)
                    own.append(Shard(name=one.name, dtype="bfloat16", global_shape=one.shape, shape=one.held, offset=one.offset, data=data))
        made.append(contribution(own, 1000, {}, str(rank)))
    return made


def test_experts_of_a_rank_are_one_piece_a_layer():
    """Else there would be a piece for each matrix of each expert: 18,432 of Qwen3-30B-A3B, where a layer's experts are one piece a rank."""
    manifest = merge(experts_of(experts=128, layers=3, ranks=2))
    check_places(manifest)
    assert len(manifest.tensors) == 3 * (3 * 128 + 1)
    assert len(manifest.pieces) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: made[:1], "expected slices of all 2408 elements, got 1208"),
        (lambda made: [made[0], made[0]], "expected a slice from element 1208 on, got one from 0 on"),
        (lambda made: [made[0], msgspec.structs.replace(made[1], version=Version(0, 2))], "one run, policy, version, transport and host"),
        (lambda made: [made[0], msgspec.structs.replace(made[1], host="other")], "other"),
        (lambda made: [made[0], msgspec.structs.replace(made[1], links=())], "rank 0 a whole version; rank 1 nothing"),
        (lambda made: [], "at least one rank"),
    ],
)
def test_contributions_that_make_no_version_are_refused(change, said):
    made = [contribution(rows_of(model(1), rank, 2), 100, {}, str(rank)) for rank in range(2)]
    with pytest.raises(WeightSyncError, match=said):
        merge(change(made))


@pytest.mark.parametrize("field", ["digest", "words"])
def test_a_digest_that_is_none_is_refused_by_name(field):
    made = [contribution(rows_of(model(1), rank, 2), 100, {}, str(rank)) for rank in range(2)]
    slices = list(made[1].slices)
    slices[0] = msgspec.structs.replace(slices[0], **{field: "no number"})
    made[1] = msgspec.structs.replace(made[1], slices=tuple(slices))
    with raises(WeightSyncError, tensor=slices[0].name):
        merge(made)


def test_ranks_whose_changes_begin_at_different_versions_are_refused():
    made = []
    for rank, parent in ((0, 0), (1, 0)):
        one = contribution(rows_of(model(1), rank, 2), 100, {}, str(rank))
        made.append(msgspec.structs.replace(one, links=(msgspec.structs.replace(one.links[0], parent=Version(0, parent)),)))
    assert merge(made).kind == "delta"
    older = msgspec.structs.replace(made[1].links[0], version=Version(0, 3), parent=Version(0, 2))
    with pytest.raises(WeightSyncError, match=r"since 0\.0; rank 1 .* since 0\.2") as caught:
        merge([made[0], msgspec.structs.replace(made[1], links=(older,))])
    assert "restart them together" in caught.value.hint


@pytest.mark.parametrize(
    ("shape", "offset", "local"), [((8, 4), (0, 2), (8, 2)), ((8, 4), (0, 0), (8, 2)), ((2, 3, 4), (0, 1, 0), (2, 1, 4))]
)
def test_columns_are_refused_with_a_way_out(shape, offset, local):
    data = np.zeros(4 * int(np.prod(local)), np.uint8)
    with pytest.raises(WeightSyncError, match=r"'w': .*range of rows") as caught:
        RankContent([Shard(name="w", dtype="float32", global_shape=shape, offset=offset, shape=local, data=data)])
    assert "full_tensor()" in caught.value.hint


async def test_a_rank_repeats_itself_without_effect_and_never_contradicts_itself(tmp_path):
    for transport in (
        BusTransport(MemoryBus("r").blobs, run="r", policy="policy"),
        ShmTransport(run="r", policy="policy", directory=tmp_path, rank=1),
    ):
        first = await transport.contribute(Version(0, 1), iter(model(1)))
        assert await transport.contribute(Version(0, 1), iter(model(1))) == first
        with pytest.raises(WeightSyncError, match="contributed before"):
            await transport.contribute(Version(0, 1), iter(model(2)))
        transport.close()


@pytest.mark.parametrize("kind", ["shm", "bus"])
async def test_two_ranks_hand_over_their_slices(memory_bus: MemoryBus, tmp_path: Path, kind: str):
    """Rank 0 announces; a follower and a late joiner read; by bus most of it are changes."""

    def transport(rank: int = 0) -> BusTransport | ShmTransport:
        if kind == "bus":
            return BusTransport(memory_bus.blobs, run="r", policy="policy", part_bytes=500, anchor_every=3, threads=1)
        return ShmTransport(run="r", policy="policy", directory=tmp_path, part_bytes=500, rank=rank)

    ranks, follower, merging = [transport(rank) for rank in range(2)], transport(), transport()
    made = []
    for number in range(5):
        given = [await rank.contribute(Version(0, number), iter(rows_of(model(number), n, 2))) for n, rank in enumerate(ranks)]
        manifest = merging.merge([decode(encode(one), Contribution) for one in given])
        assert manifest.digest == Content(model(number)).digest
        assert await follower.holds(manifest)
        joiner = transport()
        for reader in (follower, joiner):
            assert (await fetched(reader, manifest)).tobytes() == whole(number)
        async with joiner.source(manifest) as source:
            # Ranks' files are read where they lie.
            assert len(source.more) == (kind == "shm")
            assert MappedVersion(source, manifest.nbytes).bytes(0, manifest.nbytes).tobytes() == whole(number)
        joiner.close()
        made.append(manifest)
    part = made[-1].parts[-1]
    if kind == "shm":
        assert len({part.location for part in made[-1].parts}) == 2
        path = tmp_path / part.location
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    else:
        assert [manifest.kind for manifest in made] == ["full", "delta", "delta", "full", "delta"]
        await memory_bus.blobs.delete(part.location)
    with pytest.raises(WeightSyncError, match=r"sha256|got none"):
        await fetched(transport(), made[-1])
    await merging.retire(Version(0, 4))
    assert [await merging.holds(manifest) for manifest in made[:3]] == [False] * 3
    for one in (*ranks, follower, merging):
        one.close()


def contributed(number: int, ranks: int) -> list[Contribution]:
    made = []
    for rank in range(ranks):
        content = RankContent(rows_of(model(number), rank, ranks))
        part = PartRef(f"v{number}.r{rank}", 0, content.nbytes, handle=b"%d" % rank, copying=Copying(number, 64, (content.nbytes,)))
        whole = Link(version=Version(0, number), parts=(part,))
        links = (whole,) if content.nbytes else ()
        named: dict[str, Any] = {"run": "r", "policy": "p", "version": Version(0, number), "transport": "ipc", "host": "h"}
        made.append(Contribution(slices=content.slices, links=links, **named))
    return made


def alone(contributions: Sequence[Contribution]) -> Manifest:
    return msgspec.structs.replace(merge(contributions), links={}, published_s=0.0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_versions_are_merged_as_each_by_itself(ranks: int) -> None:
    merger = Merger()
    for number in (1, 2, 3):
        contributions = contributed(number, ranks)
        assert msgspec.structs.replace(merger.merge(contributions), published_s=0.0) == alone(contributions)
    other = contributed(4, ranks + 1)
    assert msgspec.structs.replace(merger.merge(other), published_s=0.0) == alone(other)


def test_contributions_that_no_longer_fit_are_refused_as_they_were() -> None:
    merger = Merger()
    merger.merge(contributed(1, 2))
    first, second = contributed(2, 2)
    with pytest.raises(WeightSyncError, match="one run, policy, version"):
        merger.merge([first, msgspec.structs.replace(second, version=Version(0, 3))])
    with pytest.raises(WeightSyncError, match="slice"):
        merger.merge([first, msgspec.structs.replace(second, slices=second.slices[1:])])
    with pytest.raises(WeightSyncError):
        merger.merge([first])
    with pytest.raises(WeightSyncError, match="slices of every rank"):
        merger.merge([first, msgspec.structs.replace(second, links=())])
    crooked = msgspec.structs.replace(second.slices[0], digest="no digest here!!")
    with pytest.raises(WeightSyncError, match="digest of a slice"):
        merger.merge([first, msgspec.structs.replace(second, slices=(crooked, *second.slices[1:]))])
    assert merger.merge([first, second]).digest == alone([first, second]).digest
