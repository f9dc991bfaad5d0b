"""Micro-batches: every wanted token is predicted once, by a state that sees exactly its own sample's past."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from streamrl.core.batches import TrainBatch
from streamrl.core.packing import ROW, MicroBatch, empty_micro_batch, packed_row_length, plan_micro_batches, split_groups, trial_row
from streamrl.core.truncated import truncated_samples, with_ends
from streamrl.errors import TrainingError
from streamrl.schemas.samples import Status
from tests.support.errors import raises

MakeBatch = Callable[..., TrainBatch]


@st.composite
def groups(draw: st.DrawFn) -> list[dict[str, object]]:
    samples: list[dict[str, object]] = []
    for task in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
        for rollout in range(draw(st.integers(1, 4))):
            answer = draw(st.lists(st.integers(1, 3), min_size=0, max_size=7))
            mask = draw(st.lists(st.booleans(), min_size=len(answer), max_size=len(answer)))
            samples.append({"prompt": prompt, "answer": answer, "mask": mask, "task": task, "rollout": rollout})
    return samples


def seen_by(micro: MicroBatch, source: int) -> tuple[list[int], list[int]]:
    """Tokens and positions that a state may look at, by the rule in the module's docstring."""
    row, column = divmod(source, micro.inputs.shape[1])
    see = micro.tree[row] == micro.tree[row, column]
    see &= (micro.branch[row] == 0) | (micro.branch[row] == micro.branch[row, column])
    see[column + 1 :] = False
    return micro.inputs[row, see].tolist(), micro.positions[row, see].tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(samples=groups(), budget=st.integers(1, 60), share=st.booleans(), several=st.booleans(), width=st.sampled_from([1, 64]))
def test_each_token_is_predicted_once_from_its_own_past(
    make_batch: MakeBatch, samples: list[dict[str, object]], budget: int, share: bool, several: bool, width: int
) -> None:
    batch = make_batch(samples)
    chosen = np.arange(batch.num_samples)
    plans = plan_micro_batches(batch, batch.loss_mask, chosen, budget=budget, share_prefixes=share, several_per_row=several, width=width)
    targets = np.concatenate([p.target for p in plans]) if plans else np.zeros(0)
    assert sorted(targets.tolist()) == np.flatnonzero(batch.loss_mask).tolist()
    for plan in plans:
        assert plan.inputs.size <= budget or len(plan.inputs) == 1
        assert plan.source.max() < plan.inputs.size
        for source, target in zip(plan.source.tolist(), plan.target.tolist(), strict=True):
            start = int(batch.offsets[np.searchsorted(batch.offsets, target, side="right") - 1])
            tokens, positions = seen_by(plan, source)
            assert tokens == batch.tokens[start:target].tolist()
            assert positions == list(range(target - start))


def test_a_group_shares_its_prompt_where_that_fits_and_pays(make_batch: MakeBatch) -> None:
    batch = make_batch([{"prompt": [1] * 8, "answer": [2 + r, 9, 9], "task": t, "rollout": r} for t in range(3) for r in range(4)])
    (plan,) = plan_micro_batches(batch, batch.loss_mask, np.arange(12), budget=1000)
    assert plan.inputs.shape == (3, 8 + 4 * 2)
    assert not plan.plain
    (alone,) = plan_micro_batches(batch, batch.loss_mask, np.arange(12), budget=1000, share_prefixes=False)
    assert alone.inputs.shape == (12, 10)
    assert alone.plain
    assert (alone.branch == 1).all()
    batch = make_batch([{"prompt": [1] * 8, "answer": [2 + r, 9, 9], "task": 0, "rollout": r} for r in range(4)])
    assert [p.inputs.shape for p in plan_micro_batches(batch, batch.loss_mask, np.arange(4), budget=16)] == [(1, 16)]
    assert [p.inputs.shape for p in plan_micro_batches(batch, batch.loss_mask, np.arange(4), budget=15)] == [(1, 10)] * 4
    batch = make_batch([{"prompt": [1] * 4, "answer": [2 + r] * 400, "task": 0, "rollout": r} for r in range(4)])
    plans = plan_micro_batches(batch, batch.loss_mask, np.arange(4), budget=10_000, width=8)
    assert [p.inputs.shape for p in plans] == [(4, 403)]
    batch = make_batch([{"prompt": [1], "answer": [2] * n, "task": t} for t, n in enumerate((10, 6, 4, 3, 3))])
    (plan,) = plan_micro_batches(batch, batch.loss_mask, np.arange(5), budget=100)
    assert plan.inputs.shape == (3, 10)
    assert [len(set(row)) for row in plan.tree.tolist()] == [1, 2, 2]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(prompt=st.integers(1, 8), answers=st.lists(st.integers(1, 20), min_size=2, max_size=3), width=st.integers(0, 3))
@example(prompt=2, answers=[2, 3], width=0)  # 5^2 = 3^2 + 4^2: as dear, so not shared
def test_a_prompt_is_shared_where_that_is_cheaper(make_batch: MakeBatch, prompt: int, answers: list[int], width: int) -> None:
    samples = [{"prompt": [1] * prompt, "answer": [2 + r] * n, "task": 0, "rollout": r} for r, n in enumerate(answers)]
    batch = make_batch(samples)
    fed = [prompt + n - 1 for n in answers]
    tree = prompt + sum(n - 1 for n in answers)
    cheaper = tree * (6 * width + tree) < sum(n * (6 * width + n) for n in fed)
    (plan,) = plan_micro_batches(batch, batch.loss_mask, np.arange(len(fed)), budget=10_000, width=width)
    assert (plan.branch == 0).sum() == (prompt if cheaper else 0)


def test_a_layout_by_hand(make_batch: MakeBatch) -> None:
    batch = make_batch(
        [
            {"prompt": [5, 6, 7], "answer": [1], "task": 0, "rollout": 0},
            {"prompt": [5, 6, 7], "answer": [2, 3], "task": 0, "rollout": 1},
            {"prompt": [4], "answer": [8, 9, 8, 9, 8], "task": 1},
        ]
    )
    (plan,) = plan_micro_batches(batch, batch.loss_mask, np.arange(3), budget=10)
    assert plan.inputs.tolist() == [[4, 8, 9, 8, 9], [5, 6, 7, 2, 0]]
    assert plan.positions.tolist() == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 0]]
    assert plan.tree.tolist() == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 0]]
    assert plan.branch.tolist() == [[1, 1, 1, 1, 1], [0, 0, 0, 2, 2]]
    assert plan.source.tolist() == [0, 1, 2, 3, 4, 7, 7, 8]
    assert plan.target.tolist() == [10, 11, 12, 13, 14, 3, 7, 8]
    assert plan.copies.tolist() == [[1] * 5, [2, 2, 2, 1, 0]]
    assert plan.fed.tolist() == [[9, 10, 11, 12, 13], [0, 1, 2, 7, -1]]
    assert (plan.plain, plan.starts, plan.longest) == (False, None, 0)


def test_a_prompt_is_shared_as_far_as_it_went_to_the_same_experts(make_batch: MakeBatch) -> None:
    batch = make_batch([{"prompt": [1] * 8, "answer": [2 + r, 9], "task": 0, "rollout": r} for r in range(3)])
    routed = np.zeros((30, 2, 2), np.int16)
    routed[10 + 5, 1, 0] = 1  # of the second sample's sixth token, in one layer
    (plan,) = plan_micro_batches(replace(batch, routed_experts=routed), batch.loss_mask, np.arange(3), budget=100)
    assert plan.branch.tolist() == [[0] * 5 + [1] * 4 + [2] * 4 + [3] * 4]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12), budget=st.integers(1, 60))
@example(lengths=[10, 6, 5, 4, 3, 2], budget=100)
def test_rows_are_filled_by_best_fit(make_batch: MakeBatch, lengths: list[int], budget: int) -> None:
    """Longest first, each into the row with the least room that takes it; what fits into no row goes to the next micro-batch."""
    batch = make_batch([{"prompt": [1], "answer": [2] * n, "task": t} for t, n in enumerate(lengths)])
    plans = plan_micro_batches(batch, batch.loss_mask, np.arange(len(lengths)), budget=budget)
    left = sorted(lengths, reverse=True)
    for plan in plans:
        rows: list[list[int]] = []
        rest: list[int] = []
        for n in left:
            fits = [row for row in rows if left[0] - sum(row) >= n]
            if fits:
                max(fits, key=sum).append(n)
            elif len(rows) < max(1, budget // left[0]):
                rows.append([n])
            else:
                rest.append(n)
        assert plan.inputs.shape == (len(rows), left[0])
        assert np.bincount(plan.source // left[0]).tolist() == [sum(row) for row in rows]
        left = rest
    assert not left


def test_the_plan_depends_on_nothing_but_its_arguments(make_batch: MakeBatch) -> None:
    rng = np.random.default_rng(0)
    samples = [{"prompt": [1] * 3, "answer": rng.integers(1, 9, rng.integers(1, 30)).tolist(), "task": i // 4} for i in range(40)]
    first, second = (plan_micro_batches(make_batch(samples), make_batch(samples).loss_mask, np.arange(40), budget=90) for _ in range(2))
    assert [p.target.tolist() for p in first] == [p.target.tolist() for p in second]


@pytest.mark.parametrize(("groups_", "parts", "sizes"), [(4, 2, [6, 6]), (3, 2, [6, 3]), (2, 5, [3, 3])])
def test_optimizer_steps_take_whole_groups(make_batch: MakeBatch, groups_: int, parts: int, sizes: list[int]) -> None:
    batch = make_batch([{"prompt": [1], "answer": [2], "task": 7 * t, "rollout": r} for t in range(groups_) for r in range(3)])
    split = split_groups(batch, parts)
    assert [len(s) for s in split] == sizes
    assert np.concatenate(split).tolist() == list(range(batch.num_samples))


def test_packed_rows_are_as_long_as_the_budget_or_of_one_of_few_lengths_for_longer_samples() -> None:
    def length(longest: int, budget: int) -> int:
        return packed_row_length(TrainBatch.from_lists([[1] * 2, [1]], [[1], [1] * (longest - 1)]), budget)

    assert [length(longest, 40) for longest in (3, 39, 40)] == [40] * 3
    # Within a large budget no longer than they need be.
    assert [length(longest, 20_000) for longest in (3, 8192, 8193, 16_384, 16_385)] == [8192, 8192, 16_384, 16_384, 20_000]
    found = {length(longest, 40) for longest in range(41, 1025)}
    assert all(longest <= length(longest, 40) < 1.125 * longest for longest in range(41, 1025))
    assert len(found) < 8 * 5 and max(found) == 1024
    assert [length(41, 41), length(7, 4), length(15, 4)] == [41, 7, 15]


def test_padding_is_cut_where_it_is_longer_than_samples_are() -> None:
    """Attention looks at no more than `longest` positions of a sample: what it left out would be whatever was in memory."""
    batch = TrainBatch.from_lists([[1]] * 3, [[1] * n for n in (ROW - 1, 4000, 3000)])
    plans = plan_micro_batches(batch, batch.loss_mask, np.arange(3), budget=3 * ROW, row_length=3 * ROW)
    assert [(plan.longest, plan.plain) for plan in plans] == [(ROW, False)]
    (plan,) = plans
    assert plan.starts is not None and plan.starts.tolist() == [0, ROW - 1, ROW + 3999, ROW + 6999, 2 * ROW + 6999, 3 * ROW]
    assert np.diff(plan.starts).max() <= ROW


def test_packed_rows_share_nothing_and_are_filled_to_the_last_position() -> None:
    batch = TrainBatch.from_lists([[1]] * 4, [[1] * n for n in (5, 3, 8, 2)])
    plans = plan_micro_batches(batch, batch.loss_mask, np.arange(4), budget=8, row_length=8)
    assert [plan.starts.tolist() for plan in plans if plan.starts is not None] == [[0, 8, 8], [0, 5, 8, 8], [0, 2, 8]]
    assert [plan.branch.min() for plan in plans] == [1, 1, 1]
    alike = TrainBatch.from_lists([[1] * 2] * 2, [[1] * 4, [1] * 2], tasks=[0, 0])
    (plan,) = plan_micro_batches(alike, alike.loss_mask, np.arange(2), budget=8, row_length=8)
    assert plan.starts is not None and (plan.starts.tolist(), plan.branch.min()) == ([0, 5, 8, 8], 1)
    with raises(TrainingError, expected=7, got=8):
        plan_micro_batches(batch, batch.loss_mask, np.arange(4), budget=8, row_length=7)


def test_rows_that_predict_nothing() -> None:
    batch = TrainBatch.from_lists([[1]], [[1, 2]])
    alone, packed, trial = empty_micro_batch(batch), empty_micro_batch(batch, 3 * ROW), trial_row(2 * ROW + 5)
    assert (alone.inputs.shape, alone.plain, alone.starts, alone.longest) == ((1, 1), True, None, 0)
    assert packed.starts is not None and packed.starts.tolist() == [0, ROW, 2 * ROW, 3 * ROW]
    assert trial.starts is not None and trial.starts.tolist() == [0, ROW, 2 * ROW, 2 * ROW + 5, 2 * ROW + 5]
    assert trial.positions.tolist() == [list(range(2 * ROW + 5))] and trial_row(7).longest == 7
    for row, length in ((packed, 3 * ROW), (trial, 2 * ROW + 5)):
        assert (row.inputs.shape, row.plain, row.longest) == ((1, length), False, ROW)
    for row in (alone, packed, replace(trial, positions=np.zeros((1, 1), np.int64))):
        found = {name: (getattr(row, name).dtype.name, set(getattr(row, name).ravel().tolist())) for name in row.__struct_fields__[:8]}
        assert found == {
            "inputs": ("int64", {0}),
            "positions": ("int64", {0}),
            "tree": ("int32", {0}),
            "branch": ("int32", {1}),
            "copies": ("int32", {0}),
            "fed": ("int64", {-1}),
            "source": ("int64", set()),
            "target": ("int64", set()),
        }


@pytest.mark.parametrize(("mean", "cap", "num"), [(1500, 8192, 512), (8000, 16_000, 256)])
def test_packed_rows_of_a_step_are_full_and_its_ranks_have_the_same_work(mean: int, cap: int, num: int) -> None:
    """Groups of 8 with prompts of 300 and log-normal answers, as reinforcement learning has them."""
    length, width, prompt = 16_384, 1024, 300
    answers = np.random.default_rng(0).lognormal(np.log(mean) - 0.32, 0.8, num).clip(8, cap).astype(int)
    batch = TrainBatch.from_lists([[1] * prompt] * num, [[1] * n for n in answers], tasks=[i // 8 for i in range(num)])
    assert packed_row_length(batch, length) == length
    fed, trained = int((batch.lengths - 1).sum()), np.flatnonzero(batch.loss_mask)

    def work(share: list[MicroBatch]) -> tuple[int, int]:
        sample = np.searchsorted(batch.offsets, np.concatenate([plan.target for plan in share]), side="right") - 1
        own = batch.lengths[np.unique(sample)] - 1
        return int(own.sum()), int((own**2).sum())

    for ranks in (1, 2, 8):
        shares = [
            plan_micro_batches(
                batch, batch.loss_mask, np.arange(num), budget=length, row_length=length, width=width, rank=rank, ranks=ranks
            )
            for rank in range(ranks)
        ]
        assert np.array_equal(np.sort(np.concatenate([plan.target for share in shares for plan in share])), trained), ranks
        assert all(plan.inputs.shape == (1, length) for share in shares for plan in share)
        assert fed / (sum(len(share) for share in shares) * length) >= 0.97
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        tokens, attention = zip(*map(work, shares), strict=True)
        assert max(tokens) - min(tokens) <= 1.1 * length, "a row, and what another one lacks"
        assert min(attention) > 0.93 * max(attention)


def batch() -> TrainBatch:
    """Three samples of one task, of which the first and the last were cut, and one of another, cut and not trained."""
    return TrainBatch.from_lists(
        [[5, 6], [5, 6], [5, 6], [9]],
        [[7], [8, 8, 8], [7, 9], [4, 4]],
        loss_mask=[[True], [True] * 3, [True, False], [False, False]],
        tasks=[0, 0, 0, 1],
        status=[Status.TRUNCATED, Status.COMPLETED, Status.TRUNCATED, Status.TRUNCATED],
        rewards=[0.0] * 4,
    )


def test_only_trained_samples_are_cut_and_nothing_cut_is_the_same_batch() -> None:
    assert truncated_samples(batch()).tolist() == [True, False, True, False]
    own = replace(batch(), status=np.zeros(4, np.int8))
    longer, ends = with_ends(own, truncated_samples(own))
    assert not len(ends) and np.array_equal(longer.tokens, own.tokens) and np.array_equal(longer.offsets, own.offsets)


@pytest.mark.parametrize("layout", [{}, {"share_prefixes": False}, {"share_prefixes": False, "several_per_row": False}, {"row_length": 16}])
def test_the_state_behind_the_last_token_is_there_and_of_that_token(layout: dict[str, Any]) -> None:
    own = batch()
    longer, ends = with_ends(own, truncated_samples(own))
    assert np.array_equal(np.delete(longer.tokens, ends), own.tokens) and np.array_equal(np.delete(longer.loss_mask, ends), own.loss_mask)
    wanted = longer.loss_mask.copy()
    wanted[ends] = True
    micros = plan_micro_batches(longer, wanted, np.arange(4), budget=64, **layout)
    read: dict[int, tuple[int, int]] = {}
    for micro in micros:
        inputs, positions = micro.inputs.reshape(-1), micro.positions.reshape(-1)
        for source, target in zip(micro.source.tolist(), micro.target.tolist(), strict=True):
            assert target not in read
            read[target] = (int(inputs[source]), int(positions[source]))
        assert not set(ends.tolist()) & set(micro.fed.reshape(-1).tolist()), "what was added is never fed"
    assert set(read) == set(np.flatnonzero(wanted).tolist())
    for sample, end in zip((0, 2), ends.tolist(), strict=True):
        last = int(own.offsets[sample + 1]) - 1
        assert read[end] == (int(own.tokens[last]), int(own.lengths[sample]) - 1)
