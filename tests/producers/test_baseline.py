"""The greedy rollout of a task, by whichever producer: drawn at temperature 0, stored with a mask of zeros, and never else."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.core.records import Rollouts, judge
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.producers.episode import Episode, samples_of
from streamrl.producers.protocol import Context, Failure, Producer
from streamrl.producers.publishing import split
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.rollouts import main
from streamrl.producers.single_turn import SingleTurn
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Branch, Sample
from streamrl.schemas.tasks import RolloutTask, Sampling
from tests.support.policies import script, start_engine
from tests.support.producing import Loop, in_memory, samples_in, with_producer
from tests.support.rolling import PROMPT, engine_of, runner_of, task_of


def undecided(tokenizer: Tokenizer) -> np.ndarray:
    """Logits of a policy that answers 1 to 9, all of them nearly as likely, 7 a little more than the others."""
    logits = script(tokenizer, {(0, "<|assistant|>"): "7"})
    row = logits[0, tokenizer.encode("<|assistant|>")[0]]
    row[:] = -30.0
    for digit in "123456789":
        row[tokenizer.encode(digit)[0]] = 0.1 if digit == "7" else 0.0
    return logits


class Listening:
    """An engine that keeps what it was asked."""

    def __init__(self, engine: TableEngine) -> None:
        self.engine = engine
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.requests.append(request)
        async for chunk in self.engine.generate(request):
            yield chunk


@pytest.fixture
async def engine(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Any]:
    engine = await start_engine(tmp_path / "model", undecided(tokenizer))
    yield Listening(engine)
    await engine.stop()


def make_task(tokenizer: Tokenizer, num_rollouts: int = 9, seed: int = 3) -> RolloutTask:
    sampling = Sampling(max_new_tokens=4, temperature=1.5, top_k=50)
    return task_of(tokenizer, num_rollouts=num_rollouts, seed=seed, sampling=sampling, greedy_baseline=True)


async def group(engine: Any, tokenizer: Tokenizer, producer: Any, task: RolloutTask) -> tuple[list[Sample], dict[int, Failure]]:
    found = await runner_of(engine, tokenizer, producer).run(task)
    return samples_of(task, found.episodes, producer="p"), {failure.rollout: failure for failure in found.failures}


async def with_own_temperatures(task: RolloutTask, engine: RolloutEngine) -> Episode:
    """As code does that was written for training: it says a temperature wherever it may."""
    chat = engine.chat(task, sampling=Sampling(max_new_tokens=3, temperature=0.7, stop_token_ids=(1,)))
    await chat.generate(temperature=0.9, sampling={"min_p": 0.01})
    chat.user("again")
    await chat.generate(temperature=task.sampling.temperature, sampling={"temperature": 0.3} if engine.context.rollout_index else None)
    return chat.episode()


@pytest.mark.parametrize("producer", [SingleTurn(), with_own_temperatures], ids=["single_turn", "own temperatures"])
async def test_only_the_last_rollout_is_greedy_and_nothing_of_it_is_trained(engine: Any, tokenizer: Tokenizer, producer: Any) -> None:
    task = make_task(tokenizer)
    samples, failures = await group(engine, tokenizer, producer, task)
    assert not failures and [sample.rollout for sample in samples] == list(range(9))
    *others, greedy = samples
    assert tokenizer.decode(greedy.tokens.tolist()).startswith(f"{PROMPT}7") and greedy.reward is not None
    assert (
        not greedy.loss_mask.any() and greedy.sampling.temperature == 0 and not any("temperature" in turn.sampling for turn in greedy.turns)
    )
    assert all(other.loss_mask.any() and other.sampling.temperature > 0 for other in others)
    assert len({other.tokens[len(task.prompt_ids)] for other in others}) > 1, "the others are drawn"
    greedily = [request for request in engine.requests if request.sampling.temperature == 0]
    assert len(greedily) == (2 if producer is with_own_temperatures else 1)
    assert all(request.sampling.top_k == 50 for request in greedily) == (producer is not with_own_temperatures)
    record, _ = judge("run.samples.main", 1, encode_samples(samples), "0")
    assert isinstance(record, Rollouts), record
    assert [view.num_tokens > 0 for view in record.rollouts] == [True] * 8 + [False] and record.rollouts[8].highest == 0


async def test_its_other_settings_stand(engine: Any, tokenizer: Tokenizer) -> None:
    context = Context(engine=engine, tokenizer=tokenizer, task=make_task(tokenizer), seed=0, log=logging.getLogger())
    greedy = context.for_rollout(8)
    assert greedy.is_baseline and not context.is_baseline and not context.for_rollout(7).is_baseline
    assert greedy.task.sampling == replace(context.task.sampling, temperature=0.0) and greedy.task.baseline == 8
    chat = engine_of(greedy).chat(greedy.task)
    await chat.branch().generate(max_new_tokens=1, sampling={"min_p": 0.5, "temperature": 2.0})
    [asked] = engine.requests
    assert (asked.sampling.temperature, asked.sampling.min_p, asked.sampling.max_new_tokens) == (0.0, 0.5, 1)


class Whole:
    """A producer of whole groups, which asks the engine itself."""

    def __init__(self, of_rollout: bool) -> None:
        self._of_rollout = of_rollout

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        one: Producer = SingleTurn()
        found: list[Episode | Failure] = []
        for k in range(task.num_rollouts):
            own = context.for_rollout(k).task if self._of_rollout else task
            [episode] = await one.rollout(replace(own, num_rollouts=1, greedy_baseline=False), context)
            assert isinstance(episode, Episode)
            episode.rollout = k
            found.append(episode)
        return found


async def test_a_producer_of_whole_groups_draws_it_greedily_or_fails_it_with_the_reason(engine: Any, tokenizer: Tokenizer) -> None:
    samples, failures = await group(engine, tokenizer, Whole(True), make_task(tokenizer, 3))
    assert not failures and [bool(sample.loss_mask.any()) for sample in samples] == [True, True, False]
    samples, failures = await group(engine, tokenizer, Whole(False), make_task(tokenizer, 3))
    assert [sample.rollout for sample in samples] == [0, 1] and list(failures) == [2]
    assert "temperature 0, got 1.5" in failures[2].detail and "for_rollout(2)" in failures[2].detail


async def test_helpers_branches_and_agents_of_it_are_greedy_and_masked_too(engine: Any, tokenizer: Tokenizer) -> None:
    async def several(task: RolloutTask, engine: RolloutEngine) -> list[Episode]:
        chat = engine.chat(task)
        await chat.generate()
        helper = engine.chat("1+1", sampling=Sampling(max_new_tokens=2, temperature=0.5))
        await helper.generate()
        chat.user("again")
        branch = chat.branch()
        await branch.generate(temperature=0.2)
        return [helper.episode(agent="helper", reward=0.5), chat.episode(reward=1.0), branch.episode()]

    samples, failures = await group(engine, tokenizer, several, make_task(tokenizer, 2))
    assert not failures
    greedy = [sample for sample in samples if sample.rollout == 1]
    assert len(greedy) == 3 and not any(sample.loss_mask.any() for sample in greedy)
    assert greedy[2].branch == Branch(1, len(greedy[1].tokens)), "what they share is of the same place"
    assert {request.sampling.temperature for request in engine.requests} == {1.5, 0.5, 0.2, 0.0}
    trained = [sample for sample in samples if sample.rollout == 0]
    assert [sample.num_sampled for sample in trained] == [int(sample.loss_mask.sum()) for sample in trained]
    assert sum(sample.num_sampled for sample in greedy) == split(greedy)[0].greedy > 0
    assert split(trained)[0].greedy == 0 and isinstance(judge("r.samples.main", 1, encode_samples(samples), None)[0], Rollouts)


CODE = """
async def twice(task, engine):
    chat = engine.chat(task)
    await chat.generate(temperature=0.8)
    chat.user("more")
    await chat.generate()
    return chat.episode(metadata={"temperature": task.sampling.temperature, "rollouts": task.num_rollouts})
"""


@pytest.mark.process
@in_memory
async def test_user_code_in_a_process_of_its_own_needs_no_change(loop: Loop, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE)
    worker = loop.worker(config=with_producer(loop.config, f"{tmp_path / 'code.py'}:twice", children=1))
    async with loop.engine(undecided(loop.tokenizer)), loop.serving(main, worker):
        await loop.issue(1, num_rollouts=4, greedy=True)
        samples = samples_in(await loop.records(1))
        await loop.queue_is_empty()
    assert [bool(sample.loss_mask.any()) for sample in samples] == [True, True, True, False]
    assert [sample.metadata for sample in samples] == [{"temperature": 1.0, "rollouts": 4}] * 3 + [{"temperature": 0.0, "rollouts": 4}]
    assert samples[3].sampling.temperature == 0 and not any(turn.sampling for turn in samples[3].turns)
    assert [turn.sampling for turn in samples[0].turns] == [{"temperature": 0.8}, {}]
