"""The learning rate at the corners of its schedule."""

from __future__ import annotations

import pytest

from streamrl.trainers.schedule import learning_rate


def test_rises_then_falls_to_the_final_fraction() -> None:
    rates = [learning_rate(s, peak=2.0, warmup_steps=2, total_steps=7, final_fraction=0.5) for s in range(9)]
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.75, 1.5, 1.25, 1.0, 1.0, 1.0])
    assert learning_rate(2, peak=2.0, warmup_steps=1, total_steps=3, final_fraction=0.5) == pytest.approx(1.0)


def test_without_warmup_it_begins_at_the_peak() -> None:
    assert learning_rate(0, peak=3.0, warmup_steps=0, total_steps=1, final_fraction=0.1) == 3.0
    assert learning_rate(5, peak=3.0, warmup_steps=0, total_steps=1, final_fraction=1.0) == 3.0
