from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.core.seeds import rollout_seed
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError, EngineUnavailable, SchemaError
from streamrl.producers.demonstrations import demonstration
from streamrl.producers.episode import Episode
from streamrl.producers.functions import FunctionProducer
from streamrl.producers.groups import GroupRunner
from streamrl.producers.protocol import Context, Failure
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.single_turn import SingleTurn
from streamrl.rewards.functions import FunctionReward
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask
from tests.support.rolling import runner_of, task_of

ANSWERS = {(0, "<|assistant|>"): "7"}


async def one_turn(task: RolloutTask, engine: RolloutEngine) -> Episode:
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()


async def run(runner: GroupRunner, task: RolloutTask) -> tuple[list[tuple[int, float | None]], list[Failure]]:
    try:
        group = await runner.run(task)
    finally:
        await runner.close()
    return [(episode.rollout, episode.reward) for episode in group.episodes], list(group.failures)


async def test_the_runs_reward_scores_what_the_producer_did_not(engine: TableEngine, tokenizer: Tokenizer) -> None:
    async def scores_some(task: RolloutTask, engine: RolloutEngine) -> list[Episode]:
        one, two, three = (engine.chat(task) for _ in range(3))
        for chat in (one, two, three):
            await chat.generate()
        match engine.context.rollout_index:
            case 1:
                return [one.episode(), two.episode(reward=-2.0)]
            case 3:
                return [one.episode(agent="a", reward=0.5), two.episode(agent="b"), three.episode(reward=-2.0)]
            case 4:
                return [one.episode(agent="a"), two.episode(reward=1.0)]
        return [one.episode()]

    def score(task: RolloutTask, episode: ScoredEpisode) -> float:
        if (episode.rollout, episode.agent) in ((4, "a"), (5, "")):
            raise ValueError("no verdict")
        return float("nan") if episode.rollout == 6 else {"a": 7.0, "b": 0.25, "": 9.0}[episode.agent]

    made = runner_of(engine, tokenizer, scores_some, FunctionReward(score, {}))
    episodes, failures = await run(made, task_of(tokenizer, num_rollouts=7))
    assert episodes == [(0, 9.0), (1, None), (1, -2.0), (2, 9.0), (3, 0.5), (3, 0.25), (3, -2.0)]
    assert [(f.rollout, f.reason) for f in failures] == [(4, "failed"), (5, "failed"), (6, "failed")]
    assert "no verdict" in failures[0].detail and "no verdict" in failures[1].detail and "finite" in failures[2].detail


async def test_a_reward_that_breaks_fails_the_group(engine: TableEngine, tokenizer: Tokenizer) -> None:
    class Short:
        async def score(self, task: RolloutTask, episodes: Sequence[ScoredEpisode]) -> Sequence[RewardValue]:
            return [RewardValue(1.0)]

    episodes, failures = await run(runner_of(engine, tokenizer, one_turn, Short()), task_of(tokenizer, num_rollouts=3))
    assert episodes == []
    assert [f.rollout for f in failures] == [0, 1, 2]
    assert "for each of 3" in failures[0].detail


async def test_a_producer_that_forgets_a_rollout_is_told(engine: TableEngine, tokenizer: Tokenizer) -> None:
    class Forgetful:
        async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
            given = await FunctionProducer(one_turn).rollout(task, context)
            return [given[2], Failure(0, "filtered", "too easy")]

    episodes, failures = await run(runner_of(engine, tokenizer, Forgetful()), task_of(tokenizer, num_rollouts=3))
    assert episodes == [(2, 1.0)]
    assert [(f.rollout, f.reason) for f in failures] == [(0, "filtered"), (1, "failed")]


async def test_cancelling_reaches_the_engine_and_one_that_is_gone_is_said(engine: TableEngine, tokenizer: Tokenizer) -> None:
    held = runner_of(engine, tokenizer, one_turn)
    task = replace(task_of(tokenizer, num_rollouts=3), min_version=99)
    rolling = asyncio.create_task(held.run(task))
    async with asyncio.timeout(60):
        while (await engine.info()).waiting < 3:
            await asyncio.sleep(0.01)
        rolling.cancel()
        while (await engine.info()).waiting:
            await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await rolling
    await engine.stop()
    with pytest.raises(EngineError):
        await held.run(task)
    await held.close()


class Breaks:
    """An engine whose first requests, `times` of them, end with an error once some of their completions are done."""

    def __init__(self, engine: TableEngine, error: type[EngineError], times: int) -> None:
        self._engine = engine
        self._error = error
        self._left = times
        self.seeds: list[tuple[int, ...]] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.seeds.append(tuple(request.seeds))
        self._left -= 1
        async for chunk in self._engine.generate(request):
            if self._left >= 0 and chunk.completion != 1:
                continue
            yield replace(chunk, engine=f"request {len(self.seeds)}")
        if self._left >= 0:
            raise self._error("the engine has a bad day")


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("error", [EngineUnavailable, EngineError])
async def test_an_engines_failure_repeats_the_rollouts_it_has_ended_and_no_other(
    engine: TableEngine, tokenizer: Tokenizer, error: type[EngineError]
) -> None:
    broken = Breaks(engine, error, times=2)
    task = task_of(tokenizer, num_rollouts=3)
    held = runner_of(broken, tokenizer, SingleTurn())  # type: ignore[arg-type]
    group = await held.run(task)
    await held.close()
    every = tuple(rollout_seed(task.seed, rollout) for rollout in range(3))
    # The second of each broken request is done: of 0, 1, 2 that is 1, then of 0, 2 it is 2.
    assert broken.seeds == [every, (every[0], every[2]), (every[0],)]
    assert [(episode.rollout, episode.engine, episode.seed) for episode in group.episodes] == [
        (0, "request 3", every[0]),
        (1, "request 1", every[1]),
        (2, "request 2", every[2]),
    ]
    assert not group.failures


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"label": None}, "needs a label"),
        ({"label": ""}, "needs a label"),
        ({"prompt_ids": ()}, "needs a prompt"),
        ({"label": "1" * 99}, "at most 64 fit"),
    ],
)
def test_what_is_no_demonstration_is_refused(tokenizer: Tokenizer, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SchemaError, match=complaint):
        demonstration(replace(task_of(tokenizer, num_rollouts=1), **fields), tokenizer, end_token=5, max_len=64, producer="p")


async def test_a_reward_without_an_objective_fails_its_rollout(engine: TableEngine, tokenizer: Tokenizer) -> None:
    """Whoever gave it: the run's reward, or the producer with an episode of its own."""

    async def scores_one(task: RolloutTask, engine: RolloutEngine) -> Episode:
        chat = engine.chat(task)
        await chat.generate()
        given = {2: {"form": 1.0}, 3: {"right": math.nan, "form": 1.0}}.get(engine.context.rollout_index)
        return chat.episode() if given is None else chat.episode(reward=1.0, reward_parts=given)

    def score(task: RolloutTask, episode: ScoredEpisode) -> dict[str, float]:
        return {"right": 1.0, "form": 0.5} if episode.rollout == 0 else {"right": 1.0}

    made = runner_of(engine, tokenizer, scores_one, FunctionReward(score, {}), objectives=("right", "form"))
    episodes, failures = await run(made, task_of(tokenizer, num_rollouts=4))
    assert episodes == [(0, 1.5)]
    assert [(failure.rollout, failure.reason) for failure in failures] == [(1, "failed"), (2, "failed"), (3, "failed")]
    assert "'form', but" in failures[0].detail
    assert "'right', but" in failures[1].detail
    assert "this part as nan" in failures[2].detail
