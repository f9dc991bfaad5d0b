"""The loss of demonstrations."""

from __future__ import annotations

import torch

from streamrl.algorithms.losses import sft


def test_sft_is_the_negative_log_likelihood() -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    loss, metrics = sft(logprobs)
    loss.sum().backward()
    assert loss.tolist() == [1, 2]
    assert metrics == {}
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1, -1]
