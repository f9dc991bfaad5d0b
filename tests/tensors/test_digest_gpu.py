"""Digests of tensors on a GPU, by one kernel: the numbers of the numpy ones. Without Hypothesis, which a GPU host may lack."""

import pytest
import torch

from streamrl.tensors import digest_torch
from streamrl.tensors.digest import slice_digest, tensor_digest
from streamrl.tensors.digest_torch import Digester, Region, region_digests, tensor_digests, torch_sums, walk
from tests.tensors.tensors import DTYPES, cut, host, made


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
