"""On-policy distillation's term."""

from __future__ import annotations

import numpy as np

from streamrl.algorithms.distillation import distill


def test_tokens_that_the_teacher_likes_better_gain() -> None:
    advantages, reverse_kl = distill(
        np.array([1.0, 1.0, 9.0]), np.array([-2.0, -1.0, np.nan]), np.array([-1.0, -3.0, -1.0]), np.array([True, True, False]), coef=0.5
    )
    assert advantages.tolist() == [1.5, 0.0, 9.0]
    assert reverse_kl.tolist() == [-1.0, 2.0, 0.0]
