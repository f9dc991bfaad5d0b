"""Off-policy sequence masking."""

import math

import torch

from streamrl.algorithms.policy_losses import opsm_keep
from streamrl.algorithms.sequences import Packed, Padded
from tests.algorithms import reference_policy_losses as reference
from tests.algorithms.policy_cases import packed, padded, random_sequences
from tests.support.float64 import t


def test_only_bad_tokens_of_samples_that_the_policy_left_are_masked() -> None:
    # Means of log mu - log pi: 0.2, 0.2, -0.2, 0.05.
    old = t(0.1, 0.3, 0.1, 0.3, -0.2, 0.05)
    sequences = Packed(torch.tensor([0, 0, 1, 1, 2, 3]), 4)
    keep, metrics = opsm_keep(t(0, 0, 0, 0, 0, 0), old, t(-1, -1, 1, 1, -1, -1), sequences, delta=0.1)
    assert keep.tolist() == [0, 0, 1, 1, 1, 1]
    assert metrics["train/opsm_clipfrac"].tolist() == [1, 1, 0, 0, 0, 0]
    old, advantages = t(0.25, 0.25, 0.25), t(-1, -1, -1)
    sequences = Packed(torch.tensor([0, 0, 0]), 1)
    assert opsm_keep(t(0, 0, 0), old, advantages, sequences, delta=0.25)[0].tolist() == [1, 1, 1]
    assert opsm_keep(t(0, 0, 0), old, advantages, sequences, delta=0.2499)[0].tolist() == [0, 0, 0]
    keep, _ = opsm_keep(t(0, 0, 0), t(1, 1, 1), t(-1, 0, 1), Packed(torch.tensor([0, 0, 0]), 1), delta=1e-4)
    assert keep.tolist() == [0, 1, 1]


def test_equals_the_second_implementation() -> None:
    seen = set()
    for seed in range(8):
        sequences = random_sequences(seed)
        kept = reference.opsm(sequences, 0.05)
        want = [float(k) for s, row in zip(sequences, kept, strict=True) for x, k in zip(s, row, strict=True) if x.trained]
        seen |= set(want)
        for x in (packed(sequences), padded(sequences)):
            keep, metrics = opsm_keep(x.logprobs, x.mu, x.advantages, x.sequences, delta=0.05)
            assert x.flat(keep) == want, seed
            assert x.flat(metrics["train/opsm_clipfrac"]) == [1 - w for w in want], seed
            assert not keep.requires_grad
    assert seen == {0.0, 1.0}, "some are masked and some are not in these cases"


def test_nothing_outside_the_mask_is_read_or_masked() -> None:
    nan = math.nan
    mask = torch.tensor([[True, False, True], [False, False, False]])
    logprobs = torch.tensor([[-2.0, nan, -2.0], [nan, nan, -9.0]], dtype=torch.float64)
    old = torch.tensor([[-1.0, nan, -1.0], [nan, 0.0, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0]], dtype=torch.float64)
    keep, _ = opsm_keep(logprobs, old, advantages, Padded(mask), delta=0.5)
    assert keep.tolist() == [[0, 1, 0], [1, 1, 1]]
