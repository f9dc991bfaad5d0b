"""Greedy rollouts where a batch is made: their rewards are in it, and nothing else of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.algorithms.estimators import token_advantages
from streamrl.algorithms.reductions import token_weights
from streamrl.config.loss import LossConfig
from streamrl.config.reward import LengthConfig
from streamrl.core.assembly import ages, assemble, used
from streamrl.core.batch_bytes import pack, unpack
from streamrl.core.batches import TrainBatch
from streamrl.core.state import FoldConfig
from streamrl.schemas.ledger import SourceTally
from streamrl.schemas.samples import Sample, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.core.test_assembly import arrays, closed, row

CONFIG = FoldConfig(batch_tasks=2, max_staleness=4, group_size=2, baseline=True, drop_zero_variance=False)
REDUCTIONS: Any = ("rollout_mean", "token_mean", "sequence_mean", "prompt_mean", "token_mean_legacy", "constant_length")


def greedy(task: int, reward: float | None, *, rollout: int = 1, length: int = 3, **values: Any) -> Sample:
    """A greedy answer of `length` tokens, as `samples_of` makes it."""
    tokens, nothing = np.arange(length + 1, dtype=np.int32), np.zeros(length + 1)
    spans = (VersionSpan(1, None), VersionSpan(length, Version(0, 7)))
    given = {"tokens": tokens, "loss_mask": nothing.astype(np.uint8), "logprobs": nothing.astype(np.float32), "spans": spans}
    return row(task, rollout, **{"reward": reward, "sampling": Sampling(temperature=0.0), **given, **values})


def assembled(*messages: list[Sample], config: FoldConfig = CONFIG) -> TrainBatch:
    return assemble(*closed(messages, config), config)


def test_a_batch_has_the_greedy_rewards_once_a_task_and_nothing_else_of_them() -> None:
    with_them = assembled([row(0, 0), greedy(0, 0.25)], [row(1, 0)], [greedy(1, -2.0)])
    alone = replace(CONFIG, group_size=1, baseline=False)
    without = assembled([row(0, 0, group_size=1)], [row(1, 0, group_size=1)], config=alone)
    assert arrays(with_them) == {**arrays(without), "baselines": [0.25, -2.0]}
    assert without.baselines is None and with_them.num_samples == 2
    config = replace(CONFIG, group_size=3)
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
    config = replace(CONFIG, overlong_buffer=2, overlong_length=3, overlong_penalty=1.0)
    batch = assembled([row(0, 0, reward=1.0), greedy(0, 1.0, length=3)], [row(1, 0, reward=1.0), greedy(1, 1.0, length=1)], config=config)
    assert batch.rewards.tolist() == [0.5, 0.5] and batch.baselines is not None
    assert batch.baselines.tolist() == [0.0, 1.0]
    cosine = LengthConfig(kind="cosine", longest=4, cosine_right=(2.0, 1.0), cosine_wrong=(-10.0, 0.0), cosine_exceeded=-7.0)
    batch = assembled(
        [row(0, 0, reward=1.0), greedy(0, 1.0, length=2)],
        [row(1, 0, reward=1.0), greedy(1, 0.0, length=4)],
        config=replace(CONFIG, length=cosine),
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
    batch, decoded, state = closed(messages, CONFIG)
    assert assemble(batch, decoded, state, CONFIG).sources == {"a": SourceTally(2, 0.75)}
    plain = [group.rollouts[0] for group in batch.groups]
    assert ages(batch, state)["total"] == [state.version.number - one.oldest for one in plain]
    assert [one.rollouts for one in used(batch)] == [(0, 1), (0, 1)]
