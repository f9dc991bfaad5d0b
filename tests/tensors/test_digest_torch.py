"""Digests of torch tensors: the same number as the numpy ones, whatever dtype, shape, slice and strides."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.tensors import digest_torch
from streamrl.tensors.digest import MASK, slice_digest, tensor_digest
from streamrl.tensors.digest_torch import Digester, Region, region_digests, tensor_digests, torch_sums, walk
from tests.support.errors import raises

DTYPES = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.int64]


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def host(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@st.composite
def regions(draw: st.DrawFn) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...], list[int]]:
    """dtype, global shape, offset, shape of a slice, and the order of dimensions in memory."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return draw(st.sampled_from(DTYPES)), shape, offset, sizes, draw(st.permutations(list(range(len(shape)))))


def cut(whole: torch.Tensor, offset: tuple[int, ...], shape: tuple[int, ...], order: list[int]) -> torch.Tensor:
    """The slice, its dimensions in memory in `order`."""
    part = whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
    if order:
        part = part.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])
    return part


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


@pytest.mark.gpu
class TestKernel:
    def test_equals_the_numpy_digest(self) -> None:
        device = torch.device("cuda")
        assert digest_torch.kernel_works(torch.device("cuda", torch.cuda.current_device()))
        for dtype in DTYPES:
            whole = made((70, 1000, 3), dtype)
            there = whole.to(device)
            cuts = [((0, 0, 0), (70, 1000, 3)), ((3, 0, 0), (20, 1000, 3)), ((3, 5, 0), (20, 77, 3)), ((1, 2, 1), (69, 900, 2))]
            found = region_digests(
                [
                    Region(cut(there, offset, shape, order), (70, 1000, 3), offset)
                    for offset, shape in cuts
                    for order in ([0, 1, 2], [2, 0, 1])
                ]
            )
            expected = [slice_digest(host(cut(whole, o, s, [])), dtype.itemsize, whole.shape, o, s) for o, s in cuts for _ in range(2)]
            assert found == expected

    @pytest.mark.parametrize(("first", "last"), [(0, 2048), (8, 4104), (5, 405), (0, 384), (1, 5000), (4999, 5000)])
    def test_rows_of_every_length_and_alignment(self, first: int, last: int) -> None:
        for dtype in (torch.bfloat16, torch.float32):
            whole = made((40, 5000), dtype)
            part = whole[3:37, first:last]
            expected = slice_digest(host(part), dtype.itemsize, (60, 9000), (7, first + 100), tuple(part.shape))
            assert region_digests([Region(whole.cuda()[3:37, first:last], (60, 9000), (7, first + 100))]) == [expected]

    def test_many_tensors_of_every_kind_in_one_call(self) -> None:
        tensors = [made((n,), dtype, seed=n) for n in (1, 2, 1023, 1024, 1025, 32_768, 32_769, 1_000_003) for dtype in DTYPES]
        assert tensor_digests([t.cuda() for t in tensors]) == [tensor_digest(host(t), t.element_size()) for t in tensors]

    def test_a_digester_follows_its_tensors(self) -> None:
        tensors = [
            made((300, 700), torch.bfloat16).cuda(),
            made((40, 60), torch.float32).cuda().t(),
            torch.zeros(0, dtype=torch.int64, device="cuda"),
        ]
        digester = Digester(tensors)
        seen: list[list[int]] = []
        for _ in range(3):
            seen.append(digester.digests())
            assert seen[-1] == tensor_digests([t.cpu() for t in tensors])
            tensors[0].view(torch.int16).add_(1)
        assert seen[0][0] != seen[1][0] != seen[2][0]

    def test_more_elements_than_32_bits_count(self) -> None:
        tensor = torch.randint(0, 256, (3, 1 << 30), dtype=torch.uint8, device="cuda")
        region = Region(tensor[:, 5:], (3, 1 << 30), (0, 5))
        assert tensor_digests([tensor]) == torch_sums([walk(Region(tensor, (3, 1 << 30)))])
        assert region_digests([region]) == torch_sums([walk(region)])
