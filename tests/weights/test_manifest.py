from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from unittest.mock import ANY

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightSyncError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest, PartRef, TensorSpec
from streamrl.tensors.concatenation import ALIGNMENT, place_of
from streamrl.tensors.digest import combine, digest_text, tensor_digest
from streamrl.weights.manifest import ITEM_BYTES, Content, build, check_same, cover, cut, offers
from streamrl.weights.protocol import Shard, Slice
from tests.support.errors import raises
from tests.support.wanted import host, slices


def shard(name: str, dtype: str, global_shape: tuple[int, ...], data: np.ndarray, offset=(), shape=None) -> Shard:
    own = global_shape if shape is None else shape
    return Shard(name=name, dtype=dtype, global_shape=global_shape, offset=offset, shape=own, data=data)


def whole(name: str, dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Shard:
    return shard(name, dtype, shape, rng.integers(0, 256, math.prod(shape) * ITEM_BYTES[dtype], dtype=np.uint8))


def split_rows(tensor: Shard, ranks: int) -> list[Shard]:
    """The tensor as `ranks` slices along dimension 0, uneven where it does not divide."""
    rows, item = tensor.global_shape[0], ITEM_BYTES[tensor.dtype]
    array = host(tensor).reshape(rows, -1)
    bounds = np.linspace(0, rows, ranks + 1).astype(int)
    result = []
    for low, high in itertools.pairwise(bounds):
        shape = (int(high - low), *tensor.global_shape[1:])
        begin = (int(low), *(0,) * (len(shape) - 1))
        data = array[low:high].reshape(-1)
        assert data.nbytes == math.prod(shape) * item
        result.append(shard(tensor.name, tensor.dtype, tensor.global_shape, data, begin, shape))
    return result


def manifest_of(content: Content, limit: int) -> Manifest:
    parts = [PartRef(location="f", offset=piece.start, nbytes=piece.nbytes) for piece in cut(content.nbytes, limit)]
    return build(content, run="r", policy="policy", version=Version(0, 3), parts=parts, transport="shm")


def read_all(content: Content, pieces: Sequence[Slice]) -> np.ndarray:
    out = np.full(content.nbytes, 0xFF, np.uint8)
    for piece in pieces:
        content.fill(piece.start, out[piece.start : piece.start + piece.nbytes])
    return out


names = st.text("abcdefgh.0123456789_", min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
models = st.dictionaries(names, st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), min_size=1, max_size=8).filter(
    lambda model: any(math.prod(shape) for _, shape in model.values())
)


def shards_of(model: dict[str, tuple[str, tuple[int, ...]]], seed: int) -> list[Shard]:
    rng = np.random.default_rng(seed)
    return [whole(name, dtype, shape, rng) for name, (dtype, shape) in model.items()]


@settings(max_examples=60, deadline=None)
@given(model=models, limit=st.integers(1, 200), seed=st.integers(0, 99))
@example(model={"0": ("bfloat16", ()), "00": ("bfloat16", ())}, limit=1, seed=0)
def test_tensors_lie_aligned_sorted_and_whole_in_the_parts(model, limit, seed):
    shards = shards_of(model, seed)
    content = Content(reversed(shards))
    manifest = manifest_of(content, limit)
    assert [spec.name for spec in manifest.tensors] == sorted(model, key=place_of)
    assert all(spec.offset % ALIGNMENT == 0 for spec in manifest.tensors)
    ends = [spec.offset + spec.nbytes for spec in manifest.tensors]
    assert all(end <= spec.offset for end, spec in zip(ends, manifest.tensors[1:], strict=False))
    assert all(part.nbytes <= limit for part in manifest.parts)
    assert sum(part.nbytes for part in manifest.parts) == manifest.nbytes == max(ends)

    data = read_all(content, [Slice(part.offset, part.nbytes) for part in manifest.parts])
    by_name = {one.name: one for one in shards}
    taken = np.zeros(len(data), bool)
    for spec in manifest.tensors:
        np.testing.assert_array_equal(data[spec.offset : spec.offset + spec.nbytes], by_name[spec.name].data)
        assert int(spec.digest, 16) == tensor_digest(host(by_name[spec.name]), ITEM_BYTES[spec.dtype])
        taken[spec.offset : spec.offset + spec.nbytes] = True
    assert not data[~taken].any()
    assert manifest.digest == combine({one.name: tensor_digest(host(one), ITEM_BYTES[one.dtype]) for one in shards})


@settings(max_examples=60, deadline=None)
@given(model=models, limit=st.integers(1, 200), chosen=st.data())
def test_slices_of_names_cover_exactly_those_tensors(model, limit, chosen):
    manifest = manifest_of(Content(shards_of(model, 0)), limit)
    wanted = chosen.draw(st.sets(st.sampled_from(sorted(model))))
    wants = slices(manifest, wanted)
    hit = np.zeros(manifest.nbytes, int)
    for part, pieces in cover(manifest, wants):
        for piece in pieces:
            assert part.offset <= piece.start and piece.start + piece.nbytes <= part.offset + part.nbytes
            hit[piece.start : piece.start + piece.nbytes] += 1
    assert hit.max(initial=0) <= 1
    for spec in manifest.tensors:
        assert (hit[spec.offset : spec.offset + spec.nbytes] == (spec.name in wanted)).all()


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 5), ranks=st.integers(1, 5), limit=st.integers(1, 99))
def test_slices_of_several_ranks_give_the_same_bytes_and_digest(rows, columns, ranks, limit):
    rng = np.random.default_rng(rows)
    tensors = [whole("a", "bfloat16", (rows, columns), rng), whole("b", "float32", (rows, 2, columns), rng)]
    one = Content(tensors)
    many = Content(piece for tensor in tensors for piece in split_rows(tensor, ranks))
    assert (without_words(many.tensors), many.nbytes, many.digest) == (without_words(one.tensors), one.nbytes, one.digest)
    for spec, same in zip(one.tensors, many.tensors, strict=True):
        assert bool(spec.words) == (spec.nbytes % 8 == 0)
        assert same.words in ("", spec.words)
        cuts = spec.nbytes // rows % 8 and ranks > 1 and rows > 1
        assert cuts or same.words == spec.words
    np.testing.assert_array_equal(read_all(many, cut(many.nbytes, limit)), read_all(one, cut(one.nbytes, limit)))


def without_words(tensors: Sequence[TensorSpec]) -> list[TensorSpec]:
    return [msgspec.structs.replace(spec, words="") for spec in tensors]


def test_words_are_the_digest_of_the_bytes_by_eight():
    rng = np.random.default_rng(0)
    tensors = [whole("a", "bfloat16", (3, 4), rng), whole("b", "float64", (3,), rng), whole("c", "int8", (9,), rng)]
    specs = {spec.name: spec for spec in Content(tensors).tensors}
    assert [specs[tensor.name].words for tensor in tensors[:2]] == [digest_text(tensor_digest(host(tensor), 8)) for tensor in tensors[:2]]
    assert specs["a"].words != specs["a"].digest and specs["b"].words == specs["b"].digest
    assert specs["c"].words == ""


def test_a_manifest_without_words_is_what_it_was_before_there_were_any():
    content = Content([whole("a", "bfloat16", (3, 4), np.random.default_rng(0))])
    manifest = manifest_of(content, 100)
    older = msgspec.structs.replace(manifest, tensors=tuple(without_words(manifest.tensors)))
    named = msgspec.msgpack.decode(encode(older))
    assert "words" not in named["tensors"][0]
    assert decode(encode(older), Manifest) == older
    assert decode(encode(manifest), Manifest) == manifest


@pytest.mark.parametrize(
    ("shards", "values"),
    [
        ([], {"tensors": 0}),
        ([shard("w", "float32", (0,), np.zeros(0, np.uint8))], {"tensors": 1}),
        ([shard("w", "float31", (1,), np.zeros(4, np.uint8))], {"tensor": "w", "dtype": "float31"}),
        ([shard("w", "float32", (2,), np.zeros(4, np.uint8))], {"tensor": "w", "nbytes": 4}),
        ([shard("w", "float32", (2,), np.zeros(4, np.uint8), (0,), (1,))], {"tensor": "w", "elements": 1}),
        ([shard("w", "float32", (2,), np.zeros(8, np.uint8), (1,), (2,))], {"tensor": "w", "shape": (2,)}),
        (
            [
                shard("w", "float32", (2,), np.zeros(4, np.uint8), (0,), (1,)),
                shard("w", "float32", (2,), np.zeros(4, np.uint8), (0,), (1,)),
            ],
            {"tensor": "w", "overlapping": ANY},
        ),
        (
            [shard("w", "float32", (2,), np.zeros(4, np.uint8), (0,), (1,)), shard("w", "int32", (2,), np.zeros(4, np.uint8), (1,), (1,))],
            {"tensor": "w", "dtype": "int32"},
        ),
    ],
)
def test_shards_that_are_no_version_are_refused(shards, values):
    with raises(WeightSyncError, **values):
        Content(shards)


def test_manifests_that_do_not_add_up_are_refused():
    manifest = manifest_of(Content(shards_of({"a": ("float32", (64,))}, 0)), 100)
    hole = msgspec.structs.replace(manifest, parts=(manifest.parts[0], manifest.parts[2]))
    with raises(WeightSyncError, expected=100, got=200):
        list(cover(hole, slices(manifest)))
    short = msgspec.structs.replace(manifest, parts=manifest.parts[:2])
    with raises(WeightSyncError, expected=256, got=200):
        list(cover(short, slices(manifest)))
    for want in (Slice(200, 57), Slice(-1, 2), Slice(0, -1)):
        with raises(WeightSyncError, start=want.start, nbytes=want.nbytes):
            list(cover(manifest, [want]))
    with pytest.raises(WeightSyncError, match="'z'"):
        slices(manifest, ["z"])
    with raises(WeightSyncError, limit_bytes=0):
        cut(5, 0)


def test_mirrors_are_offered_after_the_main_transport():
    manifest = manifest_of(Content(shards_of({"a": ("float32", (4,))}, 0)), 100)
    elsewhere = (PartRef(location="blob", offset=0, nbytes=16),)
    main, mirror = offers(msgspec.structs.replace(manifest, mirrors={"bus": elsewhere}))
    assert main == manifest
    assert (mirror.transport, mirror.parts, mirror.digest) == ("bus", elsewhere, manifest.digest)


def test_a_version_never_means_two_sets_of_weights():
    manifest = manifest_of(Content(shards_of({"a": ("float32", (4,))}, 0)), 100)
    check_same(manifest, manifest.digest)
    with raises(WeightSyncError, version="0.3", published=manifest.digest) as caught:
        check_same(manifest, "00")
    assert "epoch" in caught.value.hint
