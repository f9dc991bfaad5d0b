"""slime's hooks of the trainer against closed forms."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from streamrl.algorithms.estimators import token_advantages
from streamrl.algorithms.policy import PolicyTokens
from streamrl.algorithms.sequences import packed_sequences
from streamrl.config.loss import CorrectionConfig, LossConfig
from streamrl.core.batches import TrainBatch
from streamrl.trainers.torch.terms import UserLoss

NONE = CorrectionConfig(kind="none")


def batch() -> TrainBatch:
    answers = [[5, 6, 7], [8, 9], [5], [6, 6]]
    logprobs = [[-0.5] * len(ids) for ids in answers]
    masks = [[True, False, True], [True, True], [True], [True, True]]
    rewards = [1.0, 0.0, 0.0, 1.0]
    return TrainBatch.from_lists([[1, 2]] * 4, answers, rewards=rewards, sampler_logprobs=logprobs, loss_mask=masks, tasks=[3] * 4)


def test_processed_rewards_are_the_advantages_of_all_trained_tokens_and_those_of_grpo(hooks: Path) -> None:
    found = token_advantages(batch(), LossConfig(advantage=f"slime_rewards:{hooks}:normalized"))
    # (r - 1/2) / (s + 1e-6) with s = sqrt(1/3), of rewards 1, 0, 0, 1
    number = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    signs = np.repeat([1.0, -1.0, -1.0, 1.0], [3, 2, 1, 2]) * np.array([1, 0, 1, 1, 1, 1, 1, 1])
    trained = np.concatenate([[0, 0, *part] for part in np.split(signs, [3, 5, 6])])
    np.testing.assert_allclose(found.advantages, number * trained, atol=1e-12)
    assert number == pytest.approx(0.866024, abs=1e-6)
    assert found.metrics["rollout/raw_reward"] == 0.5
    ours = token_advantages(batch(), LossConfig(advantage="grpo"))
    np.testing.assert_allclose(ours.advantages, found.advantages, atol=1e-6)


def test_advantages_are_taken_from_slimes_table(hooks: Path) -> None:
    loss = LossConfig(advantage=f"slime:{hooks}:advantages", gamma=0.9)
    found = token_advantages(batch(), loss, logprobs=batch().sampler_logprobs)
    mask = batch().loss_mask
    owner = np.repeat(batch().rewards, batch().lengths)
    np.testing.assert_allclose(found.advantages, np.where(mask, owner * 0.9, 0.0), rtol=1e-6)


def tokens_of(logprobs: Tensor, at: npt.NDArray[np.int64], advantages: Tensor, difference: Tensor | float = 0.0) -> PolicyTokens:
    """The trained tokens of the batch at these places; `difference` is log (pi / mu)."""
    own = logprobs.detach()
    ages = torch.zeros(7, dtype=torch.int64)
    sequences = packed_sequences(batch(), at)
    return PolicyTokens(logprobs, proximal=own, sampler=own - difference, advantages=advantages, staleness=ages, sequences=sequences)


def test_truncated_weights_are_those_of_the_closed_form(hooks: Path) -> None:
    at = np.flatnonzero(batch().loss_mask)[::-1].copy()  # in any order
    difference = torch.tensor([1.5, 0.1, -2.5, 0.0, 1.5, 0.1, -2.5], dtype=torch.float64)
    logprobs = torch.full((7,), -1.0, dtype=torch.float64, requires_grad=True)
    tokens = tokens_of(logprobs, at, torch.arange(1.0, 8.0, dtype=torch.float64), difference)
    loss, metrics = UserLoss(f"slime:{hooks}:truncated")(tokens, LossConfig(correction=CorrectionConfig(kind="none", high=2.0)))
    # -A min(exp d, 2): exp 1.5 is beyond it, exp 0.1 = 1.1052, exp -2.5 = 0.0821
    weights = np.minimum(np.exp(difference.numpy()), 2.0)
    np.testing.assert_allclose(loss.detach().numpy(), -np.arange(1.0, 8.0) * weights, rtol=1e-12)
    np.testing.assert_allclose(metrics["train/tis"].numpy(), np.exp(difference.numpy()), rtol=1e-12)
    loss.sum().backward()
    assert logprobs.grad is not None
    np.testing.assert_allclose(logprobs.grad.numpy(), -np.arange(1.0, 8.0) * weights, rtol=1e-12)


def test_tokens_that_are_masked_have_no_loss_and_no_gradient(hooks: Path) -> None:
    logprobs = torch.full((7,), -1.0, requires_grad=True)
    tokens = tokens_of(logprobs, np.flatnonzero(batch().loss_mask), torch.ones(7))
    loss, _ = UserLoss(f"slime:{hooks}:masks_first")(tokens, LossConfig(correction=NONE))
    loss.sum().backward()
    # The first trained token of each of the samples of 2, 2, 1 and 2.
    assert loss.tolist() == [0.0, -1.0, 0.0, -1.0, 0.0, 0.0, -1.0]
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, -1.0, 0.0, -1.0, 0.0, 0.0, -1.0]


def test_a_response_goes_to_the_end_of_its_sample(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(
        "import torch\n\ndef ends(args, data):\n"
        "    lengths = data['response_lengths']\n"
        "    data['advantages'] = [tokens[-length:] * mask for tokens, length, mask in zip(data['tokens'], lengths, data['loss_masks'])]\n"
    )
    masks = [[False, True, True, False], [True, False]]
    given = TrainBatch.from_lists(
        [[1, 2]] * 2, [[5, 6, 7, 8], [9, 4]], rewards=[1.0, 0.0], sampler_logprobs=[[-0.5] * 4, [-0.5] * 2], loss_mask=masks, tasks=[3] * 2
    )
    loss = LossConfig(advantage=f"slime:{tmp_path / 'ends.py'}:ends")
    found = token_advantages(given, loss, logprobs=given.sampler_logprobs)
    assert found.advantages.tolist() == [0, 0, 0, 6, 7, 0, 0, 0, 9, 0]  # each trained token's own id
