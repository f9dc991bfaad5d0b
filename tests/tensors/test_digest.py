"""Digests: by the definition in Python integers, whatever the sharding; the same of torch tensors, whatever type, shape, slice, strides."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.core.seeds import mix64
from streamrl.errors import SchemaError
from streamrl.tensors import digest_torch
from streamrl.tensors.digest import BLOCK, MASK, as_words, combine, digest_text, slice_digest, slice_indices, tensor_digest
from streamrl.tensors.digest_torch import Digester, Region, region_digests, tensor_digests
from tests.support.errors import raises
from tests.tensors.tensors import DTYPES, cut, host, made

GAMMA = 0x9E3779B97F4A7C15


def defined(elements: list[int], start: int = 0) -> int:
    # seeds.mix64 adds gamma itself, hence i and not i + 1.
    return sum(mix64((bits + (start + i) * GAMMA) & MASK) for i, bits in enumerate(elements)) & MASK


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_equals_the_definition_for_every_width(itemsize: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, 24 * itemsize, dtype=np.uint8)
    elements = [int.from_bytes(data[i : i + itemsize].tobytes(), "little") for i in range(0, len(data), itemsize)]
    assert tensor_digest(data, itemsize, start=1 << 40) == defined(elements, 1 << 40)


def test_golden_value_never_changes() -> None:
    data = np.arange(5, dtype=np.float32).view(np.uint8)
    assert digest_text(tensor_digest(data, 4)) == "d1430de7c9a85298"
    assert combine({"b": 2, "a": 1}) == combine({"a": 1, "b": 2}) == "847822ab7c2d7e8c"


@given(cut=st.integers(0, 3 * BLOCK + 5))
def test_parts_add_up(cut: int) -> None:
    data = np.random.default_rng(0).standard_normal(3 * BLOCK + 5).astype(np.float32).view(np.uint8)
    parts = tensor_digest(data[: cut * 4], 4) + tensor_digest(data[cut * 4 :], 4, start=cut)
    assert parts & MASK == tensor_digest(data, 4)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_along_any_axis_add_up(axis: int) -> None:
    whole = np.random.default_rng(0).standard_normal((6, 40, 100)).astype(np.float32)
    total = 0
    first = 0
    for piece in np.array_split(whole, 4, axis=axis):
        offset = [0, 0, 0]
        offset[axis] = first
        first += piece.shape[axis]
        total += slice_digest(np.ascontiguousarray(piece).reshape(-1).view(np.uint8), 4, whole.shape, offset, piece.shape)
    assert total & MASK == tensor_digest(whole.reshape(-1).view(np.uint8), 4)


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_words_of_slices_that_cut_none_add_up(axis: int, itemsize: int) -> None:
    whole = np.random.default_rng(0).integers(0, 256, (8, 5, 32 * itemsize), dtype=np.uint8).view(f"V{itemsize}")
    assert whole.shape == (8, 5, 32)
    total = first = 0
    for piece in np.split(whole, {0: 4, 1: 5, 2: 4}[axis], axis=axis):
        offset = [first if dim == axis else 0 for dim in range(3)]
        first += piece.shape[axis]
        words = as_words(itemsize, whole.shape, offset, piece.shape)
        assert words is not None
        total += slice_digest(np.ascontiguousarray(piece).reshape(-1).view(np.uint8), 8, *words)
    assert total & MASK == tensor_digest(whole.reshape(-1).view(np.uint8), 8)


def test_slices_that_cut_words_have_none() -> None:
    assert as_words(2, (4, 6), (0, 0), (2, 6)) == ((6,), (0,), (3,)), "rows that end with a word together"
    assert as_words(2, (4, 6), (1, 0), (1, 6)) is None
    assert as_words(2, (4, 8), (0, 2), (4, 4)) is None
    assert as_words(4, (3,), (), (3,)) is None
    assert as_words(2, (), (), ()) is None and as_words(8, (), (), ()) == ((1,), (0,), (1,))
    assert as_words(4, (0, 3), (), (0, 3)) == ((0,), (0,), (0,))


def test_slice_indices_are_those_of_numpy() -> None:
    whole = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    assert slice_indices((2, 3, 4), (1, 0, 2), (1, 3, 2)).tolist() == whole[1:2, 0:3, 2:4].ravel().tolist()
    assert slice_indices((), (), ()).tolist() == [0]


def test_every_bit_and_every_position_counts() -> None:
    base = np.zeros(64, np.uint8)
    seen = {tensor_digest(base, 4)}
    for bit in range(8 * len(base)):
        changed = base.copy()
        changed[bit // 8] ^= 1 << (bit % 8)
        seen.add(tensor_digest(changed, 4))
    assert len(seen) == 8 * len(base) + 1
    assert combine({"a": 1, "b": 2}) != combine({"a": 2, "b": 1})


def test_refuses_bytes_that_are_no_elements() -> None:
    with raises(SchemaError, itemsize=3):
        tensor_digest(np.zeros(12, np.uint8), 3)
    with raises(SchemaError, dtype="uint8", shape=(6,)):
        tensor_digest(np.zeros(6, np.uint8), 4)
    with raises(SchemaError, shape=(4, 4), offset=(2, 0)):
        slice_indices((4, 4), (2, 0), (3, 4))


@st.composite
def regions(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[int]]:
    """dtype, global shape, offset, shape of a slice, and the order of dimensions in memory."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return draw(st.sampled_from(DTYPES)), shape, offset, sizes, draw(st.permutations(list(range(len(shape)))))


@given(region=regions(), block=st.sampled_from([1, 7, 64, 1 << 20]))
@settings(max_examples=200, deadline=None)
def test_that_of_torch_equals_the_numpy_digest(region: Any, block: int) -> None:
    dtype, shape, offset, sizes, order = region
    whole = made(shape, dtype)
    item = dtype.itemsize
    expected = slice_digest(host(whole[tuple(slice(o, o + n) for o, n in zip(offset, sizes, strict=True))]), item, shape, offset, sizes)
    before, digest_torch.BLOCK = digest_torch.BLOCK, block
    try:
        assert region_digests([Region(cut(whole, offset, sizes, order), shape, offset)]) == [expected]
        assert tensor_digests([whole, whole[:0] if shape else whole]) == [
            tensor_digest(host(whole), item),
            0 if shape else tensor_digest(host(whole), item),
        ]
    finally:
        digest_torch.BLOCK = before


def test_a_parameter_larger_than_a_block() -> None:
    tensor = torch.nn.Parameter(torch.randn(3, 700_001, generator=torch.Generator().manual_seed(0)))
    assert tensor_digests([tensor]) == [tensor_digest(host(tensor.detach()), 4)]


def test_a_digester_follows_its_tensors() -> None:
    tensors = [made((5, 7), torch.bfloat16), made((), torch.float32, 1), made((0, 3), torch.uint8), made((4, 6), torch.float32, 2).t()]
    digester = Digester(tensors)
    for _ in range(3):
        assert digester.digests() == tensor_digests(tensors)
        tensors[0].view(torch.int16).add_(1)
        tensors[3].neg_()
    assert Digester([]).digests() == Digester(tensors[2:3]).digests()[:0] == []


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_of_tensor_parallel_ranks_add_up(axis: int) -> None:
    whole = made((64, 96), torch.bfloat16)
    size = whole.shape[axis] // 4
    parts = [Region(part, (64, 96), (0, i * size) if axis else (i * size, 0)) for i, part in enumerate(whole.chunk(4, axis))]
    assert sum(region_digests(parts)) & MASK == tensor_digest(host(whole), 2)


def test_regions_that_do_not_lie_in_their_tensor_are_refused() -> None:
    with raises(SchemaError, shape=(4, 4), offset=(2, 0)):
        region_digests([Region(torch.zeros(3, 4), (4, 4), (2, 0))])
    with raises(SchemaError, shape=(4, 4)):
        region_digests([Region(torch.zeros(4), (4, 4))])
    with raises(SchemaError, itemsize=16):
        tensor_digests([torch.zeros(1, dtype=torch.complex128)])
