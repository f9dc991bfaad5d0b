"""Ragged batches of tokens for the tests of losses: as `reference_policy_losses` takes them, packed, and padded with NaN."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.algorithms.sequences import Packed, Padded, Sequences
from tests.algorithms.reference_policy_losses import PerToken, Sequence, Token


@dataclass
class Layout:
    """The same tokens in one of the layouts; `logprobs` is a leaf."""

    logprobs: Tensor
    old: Tensor
    mu: Tensor
    ref: Tensor
    advantages: Tensor
    sequences: Sequences
    padded: bool

    def flat(self, values: Tensor) -> list[float]:
        """Values of the trained tokens, sequence after sequence."""
        return values[self.sequences.mask].tolist()

    def gradient(self, loss: Tensor, weights: list[float]) -> list[float]:
        """Of the weighted sum; places outside the mask have weight 0 and must get a gradient of exactly 0."""
        everywhere = torch.zeros(self.logprobs.shape, dtype=loss.dtype).masked_scatter(
            self.sequences.mask, torch.tensor(weights, dtype=loss.dtype)
        )
        self.logprobs.grad = None
        (loss.masked_fill(~self.sequences.mask, 0.0) * everywhere).sum().backward()
        assert self.logprobs.grad is not None
        assert not self.logprobs.grad[~self.sequences.mask].any()
        return self.logprobs.grad[self.sequences.mask].tolist()


def random_sequences(seed: int, *, spread: float = 0.6) -> list[Sequence]:
    """Sequences of 1 to 7 tokens, one of a single token, one with none trained; an advantage a sequence, of both signs and 0."""
    rng = random.Random(seed)
    lengths = [1, 3, *(rng.randint(1, 7) for _ in range(6))]
    found = []
    for index, length in enumerate(lengths):
        advantage = 0.0 if index == 2 else rng.uniform(0.1, 2.0) * (-1) ** index
        sequence = []
        for _ in range(length):
            logp = -rng.expovariate(1.0)
            same = rng.random() < 0.2
            old, mu, ref = (logp if same else min(logp + rng.gauss(0.0, spread), -1e-3) for _ in range(3))
            trained = index != 1 and (length == 1 or rng.random() < 0.8)
            sequence.append(Token(torch.tensor(logp, dtype=torch.float64, requires_grad=True), old, mu, ref, advantage, trained))
        found.append(sequence)
    return found


def one_token(ratio: float, advantage: float, *, old: float = -1.0) -> list[Sequence]:
    """A single token with pi / pi_old = pi / mu = `ratio`."""
    logp = torch.tensor(old + math.log(ratio) if ratio != 1 else old, dtype=torch.float64, requires_grad=True)
    return [[Token(logp, old, old, old, advantage, True)]]


def packed(sequences: list[Sequence], *, dtype: torch.dtype = torch.float64) -> Layout:
    tokens = [(number, token) for number, sequence in enumerate(sequences) for token in sequence if token.trained]
    column = torch.tensor([[t.logp.item(), t.old, t.mu, t.ref, t.advantage] for _, t in tokens], dtype=dtype).reshape(-1, 5)
    numbers = torch.tensor([number for number, _ in tokens], dtype=torch.int64)
    logprobs = column[:, 0].clone().requires_grad_()
    return Layout(logprobs, column[:, 1], column[:, 2], column[:, 3], column[:, 4], Packed(numbers, len(sequences)), padded=False)


def padded(sequences: list[Sequence], *, dtype: torch.dtype = torch.float64) -> Layout:
    shape = (len(sequences), max(len(s) for s in sequences))
    mask = torch.zeros(shape, dtype=torch.bool)
    columns = torch.full((5, *shape), math.nan, dtype=dtype)
    for n, sequence in enumerate(sequences):
        for i, t in enumerate(sequence):
            if t.trained:
                mask[n, i] = True
                columns[:, n, i] = torch.tensor([t.logp.item(), t.old, t.mu, t.ref, t.advantage], dtype=dtype)
    logprobs = columns[0].clone().requires_grad_()
    return Layout(logprobs, columns[1], columns[2], columns[3], columns[4], Padded(mask), padded=True)


def weights_for(sequences: list[Sequence]) -> list[float]:
    """A weight for each trained token, all different: whatever a reduction may give."""
    count = sum(t.trained for s in sequences for t in s)
    return [0.1 + 0.07 * i for i in range(count)]


def reference_result(sequences: list[Sequence], losses: PerToken, weights: list[float]) -> tuple[list[float], list[float]]:
    """Losses of the trained tokens, and the gradient of their weighted sum by autograd."""
    flat = [loss for sequence in losses for loss in sequence if loss is not None]
    leaves = [t.logp for s in sequences for t in s if t.trained]
    total = sum((w * loss for w, loss in zip(weights, flat, strict=True)), torch.zeros((), dtype=torch.float64))
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    return [loss.item() for loss in flat], [0.0 if g is None else g.item() for g in grads]
