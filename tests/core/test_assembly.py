"""From a closed batch to the trainer's arrays: in an order that arrival cannot change."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.algorithms.estimators import token_advantages
from streamrl.algorithms.reductions import token_weights
from streamrl.config.loss import LossConfig
from streamrl.config.reward import LengthConfig
from streamrl.core.assembly import PARTS, ages, assemble, parts_of_ages, used
from streamrl.core.batch_bytes import pack, unpack
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import Batch, close, fold
from streamrl.core.records import judge
from streamrl.core.state import FoldConfig, FoldState, initial_state
from streamrl.errors import TrainingError
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.candidates import CandidateSets, no_candidates
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.ledger import SourceTally, Used
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.samples import LogprobMode, Sample, TurnSpan, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.rows import sample

CONFIG = FoldConfig(batch_tasks=2, max_staleness=4)
Closed = tuple[Batch, dict[int, SampleBatch], FoldState]


def closed(messages: Sequence[Sequence[Sample]], config: FoldConfig = CONFIG, state: FoldState | None = None) -> Closed:
    """Fold encoded messages in this order and close."""
    state = state or replace(initial_state(config), version=Version(0, 7))
    decoded: dict[int, SampleBatch] = {}
    for sequence, rows in enumerate(messages, 1):
        record, batch = judge("run.samples.main", sequence, encode_samples(rows), None)
        assert batch is not None
        decoded[sequence] = batch
        state, effects = fold(state, record, config)
        assert not effects.dead
    batch = close(state, config)
    assert batch is not None
    return batch, decoded, state


def row(task: int, rollout: int, *, index: int = 0, num_samples: int = 1, first: int = 0, **values: Any) -> Sample:
    tokens = np.array([task * 100 + rollout * 10 + index, first, first + 1, first + 2], np.int32)
    defaults: dict[str, Any] = {"tokens": tokens, "reward": float(task + rollout), "sample": index, "num_samples": num_samples}
    return sample(rollout, task=task, **defaults | values)


def arrays(batch: TrainBatch) -> dict[str, list[Any]]:
    names = [name for name in batch.__struct_fields__ if isinstance(getattr(batch, name), np.ndarray)]
    return {name: getattr(batch, name).tolist() for name in names}


def test_samples_are_sorted_whatever_came_first_and_keep_their_tokens() -> None:
    messages = [[row(1, 0)], [row(1, 1, index=1, num_samples=2), row(1, 1, num_samples=2)], [row(0, 1)], [row(0, 0)]]
    seen = []
    for order in itertools.permutations(messages):
        batch = assemble(*closed(order), CONFIG)
        seen.append(arrays(batch))
        assert batch.tokens[batch.offsets[:-1]].tolist() == [0, 10, 100, 110, 111]
    assert all(one == seen[0] for one in seen)
    assert seen[0]["tasks"] == [0, 0, 1, 1, 1] and seen[0]["rollouts"] == [0, 1, 0, 1, 1]
    assert seen[0]["offsets"] == [0, 4, 8, 12, 16, 20]
    assert seen[0]["rewards"] == [0.0, 1.0, 1.0, 2.0, 2.0]

    def tokens(task: int, rollout: int, length: int) -> Sample:
        ids = np.arange(length, dtype=np.int32) + 100 * task + 10 * rollout
        mask = np.array([0] + [1] * (length - 1), np.uint8)
        cover = (VersionSpan(1, None), VersionSpan(length - 1, Version(0, 7)))
        return sample(rollout, task=task, tokens=ids, loss_mask=mask, logprobs=(ids * mask / -8).astype(np.float32), spans=cover)

    batch = assemble(*closed([[tokens(0, 1, 4), tokens(0, 0, 2)], [tokens(1, 0, 3)], [tokens(1, 1, 2)]]), CONFIG)
    assert batch.tokens.tolist() == [0, 1, 10, 11, 12, 13, 100, 101, 102, 110, 111]
    assert batch.offsets.tolist() == [0, 2, 6, 9, 11]
    assert (batch.sampler_logprobs * -8).tolist() == [0, 1, 0, 11, 12, 13, 0, 101, 102, 0, 111]
    assert batch.loss_mask.tolist() == [False, True, False, True, True, True, False, True, True, False, True]


def test_dtypes_and_columns() -> None:
    values = {"sampling": Sampling(temperature=0.5, top_p=0.75, top_k=3), "logprobs": np.array([0, 0, -0.25, -3], np.float32)}
    batch = assemble(*closed([[row(0, 0, **values), row(0, 1)], [row(1, 0), row(1, 1)]]), CONFIG)
    kinds = {name: getattr(batch, name).dtype.name for name in arrays(batch)}
    assert kinds == {
        "tokens": "int32",
        "offsets": "int64",
        "loss_mask": "bool",
        "sampler_logprobs": "float32",
        "staleness": "int32",
        "temperature": "float32",
        "top_p": "float32",
        "top_k": "int32",
        "rewards": "float64",
        "tasks": "int64",
        "rollouts": "int64",
        "status": "int8",
    }
    assert (batch.kind, batch.version, batch.stage_step) == ("rl", Version(0, 7), 7)
    assert (batch.num_samples, batch.num_tokens, batch.lengths.tolist()) == (4, 16, [4, 4, 4, 4])
    assert batch.temperature.tolist() == [0.5] * 4 + [1] * 12
    assert batch.top_p.tolist() == [0.75] * 4 + [1] * 12
    assert batch.top_k.tolist() == [3] * 4 + [-1] * 12
    assert batch.sampler_logprobs[:4].tolist() == [0, 0, -0.25, -3]
    assert batch.loss_mask[:4].tolist() == [False, False, True, True]
    assert batch.staleness[:4].tolist() == [0, 0, 3, 3]


def test_the_newest_reward_counts_and_what_was_used_is_listed() -> None:
    batch, messages, state = closed([[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1)]])
    group = batch.groups[0]
    group = replace(group, rollouts=group.rollouts | {1: replace(group.rollouts[1], reward=9.0)})
    assert assemble(replace(batch, groups=(group, batch.groups[1])), messages, state, CONFIG).rewards.tolist() == [0, 9, 1, 2]
    batch, _, _ = closed([[row(1, 1)], [row(0, 0), row(0, 1)], [row(1, 0)]])
    assert used(batch) == (Used(0, (0, 1), (2, 2)), Used(1, (0, 1), (3, 1)))
    assert batch.sequences == (1, 2, 3)


def spans(*numbers: int) -> tuple[VersionSpan, ...]:
    return (VersionSpan(4 - len(numbers), None), *(VersionSpan(1, Version(0, number)) for number in numbers))


def test_what_may_not_be_trained_is_masked_and_a_batch_of_it_alone_refused() -> None:
    config = FoldConfig(batch_tasks=1, max_staleness=2, stale="mask")
    rows = [row(0, 0, spans=spans(3, 5)), row(0, 1, spans=spans(6, 7))]
    batch = assemble(*closed([rows], config), config)
    assert batch.staleness.tolist() == [0, 0, 4, 2, 0, 0, 1, 0]
    assert batch.loss_mask.tolist() == [False, False, False, True, False, False, True, True]
    config = FoldConfig(batch_tasks=1, max_staleness=4, stale="mask")
    batch, messages, state = closed([[row(0, 0), row(0, 1)]], config)
    with raises(TrainingError, version="0.9", tokens=8):
        assemble(batch, messages, replace(state, version=Version(0, 9)), config)
    config = replace(CONFIG, inexact="mask")
    turns = (TurnSpan(start=2, length=1), TurnSpan(start=3, length=1, inexact=True))
    batch = assemble(*closed([[row(0, 0, turns=turns), row(0, 1)], [row(1, 0), row(1, 1)]], config), config)
    assert batch.loss_mask.tolist() == [False, False, True, False] + [False, False, True, True] * 3


def test_ages_add_up_from_version_zero_on() -> None:
    rows = [row(0, 0, spans=spans(4, 6)), row(0, 1, spans=spans(5, 5))]
    batch, _, state = closed([rows, [row(1, 0, spans=spans(7, 7)), row(1, 1, spans=spans(7, 7))]])
    later = replace(state, version=Version(0, 9))
    parts = ages(batch, later)
    assert parts == {"total": [5, 2], "in_flight": [2, 0], "publish_lag": [1, 0], "queued": [2, 2]}
    assert parts["total"] == [sum(one) for one in zip(parts["in_flight"], parts["publish_lag"], parts["queued"], strict=True)]
    messages = [[row(0, 0, spans=spans(0, 2)), row(0, 1, spans=spans(1, 1))], [row(1, 0, spans=spans(0, 0)), row(1, 1, spans=spans(3, 3))]]
    config = FoldConfig(batch_tasks=2, max_staleness=9)
    batch, decoded, state = closed(messages, config, replace(initial_state(config), version=Version(0, 3)))
    assert ages(batch, state) == {"total": [3, 3], "in_flight": [2, 0], "publish_lag": [1, 3], "queued": [0, 0]}
    assert assemble(batch, decoded, state, config).staleness.tolist() == [0, 0, 3, 1, 0, 0, 2, 2, 0, 0, 3, 3, 0, 0, 0, 0]
    config = FoldConfig(batch_tasks=2, max_staleness=1, warmup_steps=3)
    state = replace(initial_state(config), version=Version(0, 5), warmup_steps=5)
    batch, _, state = closed([[demonstration(0)], [demonstration(1)]], config, state)
    assert ages(batch, state) == {"total": [0, 0], "in_flight": [0, 0], "publish_lag": [0, 0], "queued": [0, 0]}
    batch, decoded, state = closed([[row(0, 0, spans=spans(7, 7)), row(0, 1, spans=spans(7, 7))], [row(1, 0), row(1, 1)]])
    packed = assemble(batch, decoded, state, CONFIG)
    of_tokens, of_samples = parts_of_ages(batch, replace(packed, loss_mask=packed.loss_mask & (np.arange(16) // 4 != 2)))
    assert of_tokens.tolist() == [[0] * 6, [0] * 6, [0, 0, 0, 0, 3, 3]]
    assert of_samples.tolist() == [[0] * 3, [0] * 3, [0, 0, 3]]


def demonstration(task: int, **more: Any) -> Sample:
    values = {"spans": (VersionSpan(4, None),), "logprob_mode": LogprobMode.NONE, "logprobs": np.zeros(4, np.float32), "reward": None}
    return row(task, 0, **values, source="warmup", group_size=1, sampling=Sampling(temperature=0.25), **more)


def test_demonstrations() -> None:
    config = FoldConfig(batch_tasks=2, max_staleness=1, warmup_steps=3)
    state = replace(initial_state(config), version=Version(0, 2), warmup_steps=2)
    source: dict[str, Any] = {"metadata": {"data_source": "a"}, "candidates": BlobRef("b", "0" * 64, 0, 4)}
    batch, messages, state = closed([[demonstration(1, **source)], [demonstration(0)]], config, state)
    made = assemble(batch, messages, state, config, candidates=lambda message: no_candidates(len(message.tokens)))
    assert made.candidates is None and made.sources == {"a": SourceTally(1, None)}
    assert (made.kind, made.stage_step) == ("sft", 2)
    assert made.temperature.tolist() == [1.0] * made.num_tokens, "the loss of a demonstration is taken at temperature 1"
    assert made.temperature.dtype == np.float32
    assert np.isnan(made.rewards).all() and not made.staleness.any()
    assert ages(batch, state)["total"] == [0, 0]


def test_each_turn_keeps_what_it_was_drawn_with() -> None:
    cut = Sampling(temperature=0.5, top_p=0.75, top_k=3)
    rows = [row(0, 0, sampling=cut, logprob_mode=LogprobMode.TEMPERATURE), row(0, 1, sampling=cut, logprob_mode=LogprobMode.SAMPLED)]
    batch = assemble(*closed([rows, [row(1, 0), row(1, 1)]]), CONFIG)
    assert (batch.top_p.tolist(), batch.top_k.tolist()) == ([1] * 4 + [0.75] * 4 + [1] * 8, [-1] * 4 + [3] * 4 + [-1] * 8)
    assert batch.temperature.tolist() == [0.5] * 8 + [1] * 8
    own = {"top_p": 0.5, "top_k": 2, "min_p": 0.25, "logit_bias": {"3": 1.0}}
    turns = (TurnSpan(start=2, length=1, sampling=own), TurnSpan(start=3, length=1))
    biased = Sampling(min_p=0.5, logit_bias={4: -1.0, 2: 2.0})
    rows = [row(0, 0, turns=turns), row(0, 1, sampling=biased, logprob_mode=LogprobMode.TEMPERATURE)]
    batch = assemble(*closed([rows, [row(1, 0, sampling=biased, turns=turns), row(1, 1)]]), CONFIG)
    assert batch.top_p.tolist() == [1, 1, 0.5, 1] + [1] * 4 + [1, 1, 0.5, 1] + [1] * 4
    assert batch.top_k.tolist() == [-1, -1, 2, -1] + [-1] * 4 + [-1, -1, 2, -1] + [-1] * 4
    # Log-probs from before min-p are compared with such; a logit bias is in them all the same.
    assert batch.min_p is not None and batch.min_p.tolist() == [0, 0, 0.25, 0] + [0] * 4 + [0.5, 0.5, 0.25, 0.5] + [0] * 4
    assert batch.logit_biases is not None
    assert batch.logit_biases.of.tolist() == [-1, -1, 1, -1] + [0] * 4 + [0, 0, 1, 0] + [-1] * 4
    assert [(ids.tolist(), values.tolist()) for ids, values in batch.logit_biases.tables()] == [([2, 4], [2, -1]), ([3], [1])]
    plain = assemble(*closed([[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1)]]), CONFIG)
    assert plain.min_p is None and plain.logit_biases is None
    turns = (TurnSpan(start=2, length=1, sampling={"temperature": 0.25}), TurnSpan(start=3, length=1))
    rows = [row(0, 1), row(0, 0, sampling=Sampling(temperature=0.5), turns=turns)]
    batch = assemble(*closed([rows, [row(1, 0, turns=turns), row(1, 1)]]), CONFIG)
    assert batch.temperature.tolist() == [0.5, 0.5, 0.25, 0.5, 1, 1, 1, 1, 1, 1, 0.25, 1, 1, 1, 1, 1]
    one, two = Sampling(logit_bias={5: 1.0, 3: 2.0}), Sampling(logit_bias={4: -1.0})
    turns = (TurnSpan(start=2, length=2, sampling={"logit_bias": {"5": 1.0, "3": 2.0}}),)
    alone = assemble(*closed([[row(0, 0), row(0, 1)], [row(1, 0)], [row(1, 1, turns=turns)]]), CONFIG).logit_biases
    assert alone is not None and alone.of.tolist() == [-1] * 14 + [0] * 2
    messages = [[row(0, 0, sampling=one)], [row(0, 1, sampling=two)], [row(1, 0, turns=turns), row(1, 1)]]
    both = assemble(*closed(messages), CONFIG).logit_biases
    assert both is not None and both.of.tolist() == [0] * 4 + [1] * 4 + [-1, -1, 0, 0] + [-1] * 4
    assert [ids.tolist() for ids, _ in both.tables()] == [[3, 5], [4]]


def test_ages_fall_into_parts_by_token_and_by_sample() -> None:
    mask = np.array([0, 1, 1, 1], np.uint8)
    prompt_only = row(1, 1, spans=spans(6, 6, 6), loss_mask=np.array([0, 0, 0, 1], np.uint8))
    messages = [[row(0, 0, spans=spans(3, 4, 5), loss_mask=mask), row(0, 1, spans=spans(5, 5, 5), loss_mask=mask)]]
    messages += [[row(1, 0, spans=spans(6, 6, 6), loss_mask=mask), prompt_only]]
    batch, decoded, state = closed(messages, replace(CONFIG, max_staleness=9))
    rollouts = {group.task: group.rollouts for group in batch.groups}
    assert all(one.arrived == 7 for of_task in rollouts.values() for one in of_task.values())
    later = replace(state, version=Version(0, 8))
    packed = assemble(batch, decoded, later, CONFIG)
    of_tokens, of_samples = parts_of_ages(batch, packed)
    assert PARTS == ("in_flight", "queued", "publish_lag")
    assert of_tokens.tolist() == [[2, 1, 0, 0, 0, 0, 0, 0, 0, 0], [1] * 10, [2, 2, 2, 2, 2, 2, 1, 1, 1, 1]]
    assert of_samples.tolist() == [[2, 0, 0, 0], [1, 1, 1, 1], [2, 2, 1, 1]]
    assert (of_tokens.sum(axis=0) == packed.staleness[packed.loss_mask]).all()


def test_length_is_that_of_an_agents_samples() -> None:
    """Half way to 4 tokens: from 2 to 1 the rollout's own answer, which is right, and from -10 to 0 the agent's, which is wrong."""
    cosine = LengthConfig(kind="cosine", longest=4, cosine_right=(2.0, 1.0), cosine_wrong=(-10.0, 0.0), cosine_exceeded=-7.0)
    config = replace(CONFIG, length=cosine)
    rows = [row(0, 0, num_samples=2, reward=1.0), row(0, 0, index=1, num_samples=2, reward=1.0, agent="a", agent_reward=0.0)]
    batch = assemble(*closed([[*rows, row(0, 1, reward=0.0)], [row(1, 0), row(1, 1)]], config), config)
    assert batch.rewards[:3].round(9).tolist() == [1.5, -5.0, -5.0]


def test_large_columns_are_read_where_they_are_asked_for_and_a_sample_has_some() -> None:
    def routed(message: SampleBatch) -> np.ndarray:
        return message.tokens.astype(np.int16)[:, None, None]

    def candidates(message: SampleBatch) -> CandidateSets:
        return CandidateSets(np.arange(len(message.tokens) + 1), message.tokens.astype(np.int32))

    blob = BlobRef("b", "0" * 64, 0, 4)
    asked: dict[str, dict[str, Any]] = {"routed_experts": {"routed": routed}, "candidates": {"candidates": candidates}}
    for (column, wanted), other in zip(asked.items(), reversed(asked), strict=True):
        said: dict[str, Any] = {column: blob}
        folded = closed([[row(0, 0, **said), row(0, 1)], [row(1, 0), row(1, 1)]])
        both = assemble(*folded, CONFIG, routed=routed, candidates=candidates)
        found = getattr(both, column)
        assert (found.ids if column == "candidates" else found.ravel()).tolist() == both.tokens.tolist()
        assert getattr(both, other) is None and getattr(assemble(*folded, CONFIG, **wanted), column) is not None
        assert getattr(assemble(*folded, CONFIG), column) is None
        plain = assemble(*closed([[row(0, 0), row(0, 1)], [row(1, 0), row(1, 1)]]), CONFIG, routed=routed, candidates=candidates)
        assert getattr(plain, column) is None


def test_groups_and_rewards_by_source() -> None:
    def of(task: int, *rewards: float | None, **values: Any) -> list[Sample]:
        return [row(task, rollout, reward=reward, group_size=len(rewards), **values) for rollout, reward in enumerate(rewards)]

    config = replace(CONFIG, batch_tasks=5, drop_zero_variance=False)
    said = [{"data_source": "sums", "n": [1]}, {"data_source": "words"}, {"data_source": "sums"}, {"data_source": 3}, {"x": "data_source"}]
    rewards = [(1.0, 0.0), (0.25, 0.75), (1.0, 1.0), (0.0, 0.0), (0.0, 1.0)]
    messages = [of(task, *given, metadata=metadata) for task, (given, metadata) in enumerate(zip(rewards, said, strict=True))]
    batch, decoded, state = closed(messages, config)
    found = assemble(batch, decoded, state, config).sources
    assert found == {"sums": SourceTally(2, 0.75), "words": SourceTally(1, 0.5)}
    # The two names that come last in order have two tasks each, 66 others have one.
    names = [f"{99 - task // (1 + (task < 4)):03}" * 40 for task in range(70)]
    many = [of(task, 0.0, 1.0, metadata={"data_source": name}) for task, name in enumerate(names)]
    batch, decoded, state = closed(many, config := replace(config, batch_tasks=70))
    found = assemble(batch, decoded, state, config).sources
    assert list(found) == [*sorted({name[:64] for name in names[4:]})[:62], names[2][:64], names[0][:64]]


COMPARED = FoldConfig(batch_tasks=2, max_staleness=4, group_size=2, baseline=True, drop_zero_variance=False)
REDUCTIONS: Any = ("rollout_mean", "token_mean", "sequence_mean", "prompt_mean", "token_mean_legacy", "constant_length")


def greedy(task: int, reward: float | None, *, rollout: int = 1, length: int = 3, **values: Any) -> Sample:
    """A greedy answer of `length` tokens, as `samples_of` makes it."""
    tokens, nothing = np.arange(length + 1, dtype=np.int32), np.zeros(length + 1)
    spans = (VersionSpan(1, None), VersionSpan(length, Version(0, 7)))
    given = {"tokens": tokens, "loss_mask": nothing.astype(np.uint8), "logprobs": nothing.astype(np.float32), "spans": spans}
    return row(task, rollout, **{"reward": reward, "sampling": Sampling(temperature=0.0), **given, **values})


def assembled(*messages: list[Sample], config: FoldConfig = COMPARED) -> TrainBatch:
    return assemble(*closed(messages, config), config)


def test_a_batch_has_the_greedy_rewards_once_a_task_and_nothing_else_of_them() -> None:
    with_them = assembled([row(0, 0), greedy(0, 0.25)], [row(1, 0)], [greedy(1, -2.0)])
    alone = replace(COMPARED, group_size=1, baseline=False)
    without = assembled([row(0, 0, group_size=1)], [row(1, 0, group_size=1)], config=alone)
    assert arrays(with_them) == {**arrays(without), "baselines": [0.25, -2.0]}
    assert without.baselines is None and with_them.num_samples == 2
    config = replace(COMPARED, group_size=3)
    rows = {"group_size": 3, "num_samples": 2}
    messages = [
        [greedy(1, 3.0, rollout=2, group_size=3)],
        [row(1, 1, index=1, **rows), row(1, 1, **rows)],
        [row(0, 1, group_size=3), greedy(0, 0.5, rollout=2, group_size=3), row(0, 0, group_size=3)],
        [row(1, 0, group_size=3)],
    ]
    batch = assembled(*messages, config=config)
    assert batch.tasks.tolist() == [0, 0, 1, 1, 1] and batch.rollouts.tolist() == [0, 1, 0, 1, 1]
    assert batch.baselines is not None and batch.baselines.tolist() == [0.5, 0.5, 3.0, 3.0, 3.0]
    found = token_advantages(batch, LossConfig(advantage="remax")).advantages
    assert found[batch.loss_mask].tolist() == np.repeat([-0.5, 0.5, -2.0, -1.0, -1.0], 2).tolist()
    first, second = (greedy(0, 0.5, index=index, num_samples=2, sample=index) for index in range(2))
    batch = assembled([row(0, 0), first, second], [row(1, 0), greedy(1, 0.0)])
    assert batch.baselines is not None and batch.baselines.tolist() == [0.5, 0.0]
    batch = assembled([row(0, 0), greedy(0, 0.25)], [row(1, 0), greedy(1, -2.0)])
    again = unpack(pack(batch), TrainBatch)
    assert again.baselines.tolist() == [0.25, -2.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_no_denominator_counts_them(reduction: Any) -> None:
    more = {"constant_length": {"constant_length": 10}, "token_mean_legacy": {"legacy_samples": 1}}.get(reduction, {})
    batch = assembled([row(0, 0), greedy(0, 0.0, length=50)], [row(1, 0), greedy(1, 1.0)])
    weights = token_weights(batch, np.arange(2), reduction, **more)
    assert weights.sum() == pytest.approx(2 / 10 if reduction == "constant_length" else 1.0), "two rollouts of two tokens"


def test_what_length_adds_it_adds_to_both() -> None:
    """Of 3 tokens one is free: the trained answers of 2 lose 0.5, the greedy ones of 3 and of 1 lose 1 and 0."""
    config = replace(COMPARED, overlong_buffer=2, overlong_length=3, overlong_penalty=1.0)
    batch = assembled([row(0, 0, reward=1.0), greedy(0, 1.0, length=3)], [row(1, 0, reward=1.0), greedy(1, 1.0, length=1)], config=config)
    assert batch.rewards.tolist() == [0.5, 0.5] and batch.baselines is not None
    assert batch.baselines.tolist() == [0.0, 1.0]
    cosine = LengthConfig(kind="cosine", longest=4, cosine_right=(2.0, 1.0), cosine_wrong=(-10.0, 0.0), cosine_exceeded=-7.0)
    batch = assembled(
        [row(0, 0, reward=1.0), greedy(0, 1.0, length=2)],
        [row(1, 0, reward=1.0), greedy(1, 0.0, length=4)],
        config=replace(COMPARED, length=cosine),
    )
    assert batch.baselines is not None and batch.baselines == pytest.approx([1.5, -7.0]), "half way from 2 to 1, and too long"


def test_agents_have_the_mean_of_their_role() -> None:
    def of(agent: str, reward: float, index: int) -> dict[str, Any]:
        return {"agent": agent, "agent_reward": reward, "index": index, "sample": index, "num_samples": 3}

    trained = [row(0, 0, reward=1.0, **of(name, own, k)) for k, (name, own) in enumerate([("", 0.0), ("s/0", 0.5), ("s/1", 0.25)])]
    trained[0] = replace(trained[0], agent="", agent_reward=None)
    base = [greedy(0, 0.75, **of(name, own, k)) for k, (name, own) in enumerate([("", 0.0), ("s/0", 1.0), ("s/3", 0.5)])]
    base[0] = replace(base[0], agent="", agent_reward=None)
    batch = assembled([*trained, *base], [row(1, 0), greedy(1, 0.0)])
    assert batch.agents == ("", "s/0", "s/1", "") and batch.baselines is not None
    assert batch.baselines.tolist() == [0.75, 0.75, 0.75, 0.0], "the rollout's own, and (1 + 0.5) / 2 twice"
    assert batch.rewards.tolist() == [1.0, 0.5, 0.25, 1.0]


def test_sources_and_ages_are_of_what_is_trained() -> None:
    source: Any = {"metadata": {"data_source": "a"}}
    messages = [[row(0, 0, reward=1.0, **source), greedy(0, 0.0, **source)], [row(1, 0, reward=0.5, **source), greedy(1, 0.0, **source)]]
    batch, decoded, state = closed(messages, COMPARED)
    assert assemble(batch, decoded, state, COMPARED).sources == {"a": SourceTally(2, 0.75)}
    plain = [group.rollouts[0] for group in batch.groups]
    assert ages(batch, state)["total"] == [state.version.number - one.oldest for one in plain]
    assert [one.rollouts for one in used(batch)] == [(0, 1), (0, 1)]
