"""Masking and weighting by age."""

from __future__ import annotations

import torch

from streamrl.algorithms.staleness_weights import decay_weights, fresh

AGES = torch.tensor([0, 1, 2, 3])


def test_tokens_up_to_the_limit_are_kept() -> None:
    assert fresh(AGES, 2).tolist() == [True, True, True, False]


def test_weights_fall_by_the_same_factor_with_every_version() -> None:
    assert decay_weights(AGES, 0.5).tolist() == [1.0, 0.5, 0.25, 0.125]
    assert decay_weights(AGES, 1.0).tolist() == [1.0] * 4
    assert decay_weights(AGES, 0.0).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert decay_weights(AGES, 0.5).dtype == torch.float64
