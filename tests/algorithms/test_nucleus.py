"""What top-k and top-p leave, and its packed form."""

import pytest
import torch
from torch import Tensor

from streamrl.algorithms.nucleus import fixed_point_cumsum, packed, support, unpacked

LOGITS = torch.tensor([[0.3, 0.5, 0.05, 0.15]], dtype=torch.float64).log()


def kept(target: int, top_p: float, top_k: int, logits: Tensor = LOGITS, min_p: float | None = None) -> list[int]:
    least = None if min_p is None else torch.tensor([min_p])
    mask = support(logits, torch.tensor([target]), torch.tensor([top_p]), torch.tensor([top_k]), least)
    assert mask.dtype == torch.bool
    return mask[0].nonzero()[:, 0].tolist()


ALL = [0, 1, 2, 3]


TOP_K = {1: [1], 2: [0, 1], 3: [0, 1, 3], 4: ALL, 9: ALL, -1: ALL}
TOP_P = {1e-6: [1], 0.49: [1], 0.51: [0, 1], 0.79: [0, 1], 0.81: [0, 1, 3], 0.96: ALL}


def test_top_k_leaves_that_many_and_top_p_the_fewest_that_reach_it() -> None:
    assert {top_k: kept(1, 1.0, top_k) for top_k in TOP_K} == TOP_K
    assert {top_p: kept(1, top_p, -1) for top_p in TOP_P} == TOP_P


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, ALL), (0.09, ALL), (0.11, [0, 1, 3]), (0.31, [0, 1]), (0.61, [1]), (1.0, [1])])
def test_min_p_leaves_what_is_that_share_as_likely_as_the_likeliest(min_p: float, expected: list[int]) -> None:
    assert kept(1, 1.0, -1, min_p=min_p) == expected
    # Of the whole distribution, whatever else is cut off; and the target stays.
    assert kept(1, 1.0, 2, min_p=min_p) == expected[:2] if len(expected) < 3 else [0, 1]
    assert kept(2, 1.0, -1, min_p=min_p) == sorted({2, *expected})


def test_both_bounds_hold_and_the_target_stays_and_takes_nobodys_place() -> None:
    assert kept(0, 0.5, -1, torch.zeros(1, 4, dtype=torch.float64)) == [0, 1]
    assert kept(1, 0.79, 1) == [1]
    # Renormalised over the first two, 0.5 would be 0.625 and token 0 would go.
    assert kept(1, 0.6, 2) == [0, 1]
    assert kept(2, 1.0, 2) == [0, 1, 2]
    assert kept(2, 0.4, -1) == [1, 2]
    assert kept(0, 1.0, -1, torch.tensor([[1.0, 0.5, 0.25, 0.25]], dtype=torch.float64).log(), min_p=0.5) == [0, 1]
    assert kept(0, 1.0, -1, torch.zeros(1, 4), min_p=1.0) == ALL


def test_ties_keep_the_lower_id_and_each_token_has_its_own_bounds() -> None:
    assert kept(0, 1.0, 2, torch.zeros(1, 4)) == [0, 1]
    assert kept(2, 1.0, 2, torch.tensor([[1.0, 0.0, 1.0, 1.0, 2.0]])) == [0, 2, 4]
    assert kept(4, 1.0, 2, torch.tensor([[1.0, 0.0, 1.0, 1.0, 2.0]])) == [0, 4]
    assert kept(0, 1.0, -1, torch.tensor([[40.0, 0.0, 1.0]])) == [0, 1, 2]
    mask = support(LOGITS.repeat(3, 1), torch.tensor([1, 1, 1]), torch.tensor([1.0, 0.4, 1.0]), torch.tensor([-1, -1, 2]))
    assert mask.sum(-1).tolist() == [4, 1, 2]


@pytest.mark.parametrize("vocab", [1, 7, 8, 9, 40])
def test_packed_masks_come_back(vocab: int) -> None:
    mask = torch.rand(5, vocab, generator=torch.Generator().manual_seed(vocab)) < 0.5
    bits = packed(mask)
    assert bits.dtype == torch.uint8 and bits.shape == (5, -(-vocab // 8))
    assert torch.equal(unpacked(bits, vocab), mask)
    if vocab > 8:
        assert torch.equal(unpacked(bits[:, 1:], vocab - 8), mask[:, 8:])


def test_fixed_point_sums_are_cumulative_sums() -> None:
    probs = torch.randn(5, 4000, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert torch.allclose(fixed_point_cumsum(probs), probs.double().cumsum(-1).float(), atol=1e-7)
    assert fixed_point_cumsum(probs).dtype == probs.dtype
    small = torch.full((1, 3), 2.0**-52, dtype=torch.float64)
    assert fixed_point_cumsum(small)[0].tolist() == [2.0**-52, 2.0**-51, 3 * 2.0**-52]
    assert fixed_point_cumsum(torch.ones(1, 2047, dtype=torch.float64))[0, -1] == 2047.0
