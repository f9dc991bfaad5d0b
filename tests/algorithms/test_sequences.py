"""Sums over sequences: packed, padded, selected and split over processes give the same."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamrl.algorithms.policy_losses import gspo
from streamrl.algorithms.sequences import Packed, Padded, Selected, Sequences, mean, packed_sequences
from streamrl.core.batches import TrainBatch
from tests.support.float64 import t
from tests.support.preloaded import Preloaded

ROWS = st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans(), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5)
Rows = list[list[tuple[float, bool, bool]]]


def _packed(rows: Rows) -> tuple[Packed, Tensor, Tensor]:
    places = [(n, value, keep) for n, row in enumerate(rows) for value, trained, keep in row if trained]
    numbers = torch.tensor([n for n, _, _ in places], dtype=torch.int64)
    values = torch.tensor([v for _, v, _ in places], dtype=torch.float64)
    return Packed(numbers, len(rows)), values, torch.tensor([k for _, _, k in places], dtype=torch.bool)


def _padded(rows: Rows) -> tuple[Padded, Tensor, Tensor]:
    shape = (len(rows), max(len(row) for row in rows))
    mask, keep = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    values = torch.full(shape, math.nan, dtype=torch.float64)
    for n, row in enumerate(rows):
        for i, (value, trained, kept) in enumerate(row):
            if trained:
                mask[n, i], keep[n, i], values[n, i] = True, kept, value
    return Padded(mask), values, keep


def _check(sequences: Sequences, values: Tensor, want: list[list[float]]) -> None:
    """`want`: the values that count, of each sequence."""
    leaf = values.clone().requires_grad_()
    sums = sequences.sum(leaf)
    assert sums.tolist() == pytest.approx([sum(row) for row in want])
    assert sequences.max(values).tolist() == [max(row, default=-math.inf) for row in want]
    assert not sequences.max(leaf).requires_grad
    means = mean(sequences, leaf)
    assert means.tolist() == pytest.approx([sum(row) / len(row) if row else 0.0 for row in want])
    factors = torch.arange(1.0, len(want) + 1, dtype=torch.float64)
    ((sums + means) * factors).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad[sequences.mask].tolist() == pytest.approx(
        [f * (1 + 1 / len(row)) for f, row in zip(factors.tolist(), want, strict=True) for _ in row]
    )
    assert not leaf.grad[~sequences.mask].any()
    assert sequences.spread(factors)[sequences.mask].tolist() == [f for f, row in zip(factors.tolist(), want, strict=True) for _ in row]


@settings(deadline=None)
@given(ROWS)
def test_both_layouts_against_python_sums(rows: Rows) -> None:
    want = [[value for value, trained, _ in row if trained] for row in rows]
    for sequences, values, _ in (_packed(rows), _padded(rows)):
        _check(sequences, values, want)


@settings(deadline=None)
@given(ROWS)
def test_selected_leaves_tokens_out_and_reads_none_of_them(rows: Rows) -> None:
    want = [[value for value, trained, keep in row if trained and keep] for row in rows]
    for sequences, values, keep in (_packed(rows), _padded(rows)):
        _check(Selected(sequences, keep), values.masked_fill(~keep, math.nan), want)


LOGPROBS, OLD, ADVANTAGES = (-1.0, -0.5, -0.2, -2.0, -1.5), (-1.1, -0.4, -0.6, -2.0, -1.9), (1.0, 1.0, 1.0, -2.0, -2.0)
NUMBERS = (0, 0, 0, 1, 1)
HALVES = ((0, 3), (1, 2, 4))


def loss_of_rank(rank: int, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{results}/rendezvous", rank=rank, world_size=2)
    try:
        own = list(HALVES[rank])
        logprobs = t(*LOGPROBS)[own].requires_grad_()
        sequences = Packed(torch.tensor(NUMBERS)[own], 2, group=dist.group.WORLD)
        maxima = sequences.max(logprobs)
        loss, _ = gspo(logprobs, t(*OLD)[own], t(*ADVANTAGES)[own], sequences, clip_low=0.5, clip_high=0.5)
        loss.sum().backward()
        assert logprobs.grad is not None
        torch.save({"loss": loss.detach(), "gradient": logprobs.grad, "max": maxima}, f"{results}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.process
def test_gspo_over_sequences_split_between_two_processes(tmp_path: Path, preloaded: Preloaded) -> None:
    calls = (f"from {__name__} import loss_of_rank; loss_of_rank({rank}, {str(tmp_path)!r})" for rank in range(2))
    assert [child.wait(timeout=120) for child in [preloaded.start("-c", call) for call in calls]] == [0, 0]
    logprobs = t(*LOGPROBS).requires_grad_()
    whole = Packed(torch.tensor(NUMBERS), 2)
    loss, _ = gspo(logprobs, t(*OLD), t(*ADVANTAGES), whole, clip_low=0.5, clip_high=0.5)
    loss.sum().backward()
    assert logprobs.grad is not None
    for rank, own in enumerate(HALVES):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert found["loss"].tolist() == pytest.approx(loss[list(own)].tolist(), rel=1e-14)
        assert found["gradient"].tolist() == pytest.approx(logprobs.grad[list(own)].tolist(), rel=1e-14)
        assert found["max"].tolist() == whole.max(logprobs).tolist()


def test_packed_tokens_may_come_in_any_order() -> None:
    sequences = Packed(torch.tensor([2, 0, 2, 0]), 3)
    assert sequences.sum(t(1, 2, 3, 4)).tolist() == [6, 0, 4]
    assert sequences.max(t(1, 2, 3, 4)).tolist() == [4, -math.inf, 3]
    assert sequences.spread(t(7, 8, 9)).tolist() == [9, 7, 9, 7]
    # Tokens 1, 2 are sample 0's, 4 is sample 1's, which has none here, 6 and 7 are sample 2's.
    batch = TrainBatch.from_lists([[1], [1], [1]], [[2, 3], [4], [5, 6]])
    found = packed_sequences(batch, np.array([2, 7, 1, 6]))
    assert found.sum(t(1.0, 10.0, 2.0, 20.0)).tolist() == [3.0, 30.0]
    assert found.mask.tolist() == [True] * 4
