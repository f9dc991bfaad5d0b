"""Digests of torch tensors: the same number as the numpy ones, whatever dtype, shape, slice and strides."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.tensors import digest_torch
from streamrl.tensors.digest import MASK, slice_digest, tensor_digest
from streamrl.tensors.digest_torch import Digester, Region, region_digests, tensor_digests
from tests.support.errors import raises
from tests.tensors.tensors import DTYPES, cut, host, made


@st.composite
def regions(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[int]]:
    """dtype, global shape, offset, shape of a slice, and the order of dimensions in memory."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return draw(st.sampled_from(DTYPES)), shape, offset, sizes, draw(st.permutations(list(range(len(shape)))))


@given(region=regions(), block=st.sampled_from([1, 7, 64, 1 << 20]))
@settings(max_examples=200, deadline=None)
def test_equals_the_numpy_digest(region: Any, block: int) -> None:
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
