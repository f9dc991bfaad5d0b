"""The evaluator on several sets, killed and started again, beside another one, with engines that go and graders that hang."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, SetRewardConfig
from streamrl.config.tree import Config, WarmupConfig
from streamrl.engines.batching.delays import TokenDelay
from streamrl.errors import BusUnavailable
from streamrl.producers.evaluation.asking import Room
from streamrl.producers.evaluation.store import open_store
from streamrl.producers.evaluation.worker import main
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.policies import script, serve_logits
from tests.support.processes import until
from tests.support.producing import Loop, in_memory
from tests.support.tiny import ended

GRADE = """import time


def half(task, episode):
    return 0.5


def hangs(task, episode):
    time.sleep(60)
"""


@pytest.fixture
def config(loop: Loop, tmp_path: Path) -> Config:
    """Two sets: nine rows answered by "7", of which two have another label; and the first three of them, four samples of each."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "3+4", "label": "7" if row not in (1, 5) else "8"}) + "\n" for row in range(9)))
    (tmp_path / "grade.py").write_text(GRADE)
    sets = (
        EvaluationSetConfig(name="all", path=str(path)),
        EvaluationSetConfig(name="few", path=f"{path}@[0:3]", n=4, sampling={"temperature": 1.0}, every=0),
    )
    return replace(
        loop.config,
        warmup=WarmupConfig(max_steps=5),
        evaluation=EvaluationConfig(every=1, sampling=Sampling(temperature=0.0, max_new_tokens=500), sets=sets),
    )


async def trained(loop: Loop, number: int) -> None:
    entry = LedgerEntry(
        run=loop.config.run.name,
        trainer="main",
        version=Version(0, number),
        source="main",
        used=(),
        cursor=0,
        granted=0,
        retired=0,
        warm=True,
    )
    await loop.bus.publish(loop.subjects.ledger("main"), encode(entry), id=str(number))


async def told(loop: Loop, count: int, *, within_s: float = 30) -> list[dict[str, Any]]:
    """The details of the first `count` evaluations."""
    found: list[dict[str, Any]] = []
    async with asyncio.timeout(within_s):
        async for message in loop.bus.read(EVENTS, after=0, subject=loop.subjects.events("evaluation")):
            found.append(decode(message.body, Event).detail)
            if len(found) == count:
                break
    return found


def stored(loop: Loop, version: str, name: str) -> Path:
    return loop.run_dir.evaluation_path(version, name)


async def test_each_set_is_asked_in_its_own_way_and_when_it_is_due(loop: Loop, config: Config) -> None:
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    worker = loop.worker(kind="evaluator", config=config)
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 2))
        service = asyncio.create_task(main(worker))
        await trained(loop, 1)
        await told(loop, 2)
        await trained(loop, 2)
        await told(loop, 3)
        await ended(loop.bus, 2)
        async with asyncio.timeout(20):
            await service
    found = await told(loop, 4)
    said = [(one["set"], one["version"], one["num"], one["samples"], one["final"]) for one in found]
    assert said[:3] == [("all", "0.1", 9, 9, False), ("few", "0.1", 3, 12, False), ("all", "0.2", 9, 9, False)]
    # At the end version 2 of `all` was told already; the last event is final.
    assert said[3:] == [("few", "0.2", 3, 12, True)]
    assert found[0]["accuracy"] == pytest.approx(7 / 9)
    assert found[0]["versions"] == ["0.2", "0.2"] and not found[0]["pinned"]
    assert {k: round(rate["value"], 4) for k, rate in found[1]["pass"].items()} == {"1": 0.6667, "2": 0.6667, "4": 0.6667}
    assert json.loads(stored(loop, "0.1", "few").with_suffix(".json").read_text())["accuracy"] == found[1]["accuracy"]


class Mute:
    """A bus that takes no event of an evaluation."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def publish(self, subject: str, body: bytes, **more: Any) -> Any:
        if subject.endswith("events.evaluation"):
            raise BusUnavailable("away")
        return await self._bus.publish(subject, body, **more)


async def test_what_was_answered_before_a_death_is_not_asked_again(loop: Loop, config: Config) -> None:
    """Dead between the last answer and the event; then with a part of the answers, and the last of them torn."""
    config = replace(config, evaluation=replace(config.evaluation, sets=config.evaluation.sets[:1]))
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    path = stored(loop, "0.1", "all")
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 1))
        await trained(loop, 1)
        with pytest.raises(ExceptionGroup) as caught:
            await main(loop.worker(kind="evaluator", config=config, bus=Mute(loop.bus)))  # type: ignore[arg-type]
        assert caught.group_contains(BusUnavailable)
        lines = path.read_bytes().splitlines(keepends=True)
        assert len(lines) == 10
        before = (await engine.info()).tokens_total
        async with loop.serving(main, loop.worker(kind="evaluator", config=config)):
            [first] = await told(loop, 1)
        assert (await engine.info()).tokens_total == before
        assert (first["resumed"], first["num"], first["samples"]) == (9, 9, 9)
        # The next version, of which an evaluator has stored four answers and a part of the fifth.
        await trained(loop, 2)
        await serve_logits(engine, logits, Version(0, 2))
        with pytest.raises(ExceptionGroup):
            await main(loop.worker(kind="evaluator", config=config, bus=Mute(loop.bus)))  # type: ignore[arg-type]
        path = stored(loop, "0.2", "all")
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:5]) + lines[5][:11])
        before = (await engine.info()).tokens_total
        async with loop.serving(main, loop.worker(kind="evaluator", config=config)):
            [_, second] = await told(loop, 2)
        assert (await engine.info()).tokens_total == before + 2 * 5  # "7" and the end, of five problems
        assert (second["resumed"], second["num"], second["accuracy"]) == (4, 9, pytest.approx(7 / 9))
        rows = [json.loads(line)["row"] for line in path.read_text().splitlines()[1:]]
        assert sorted(rows) == list(range(9))


async def test_another_evaluator_waits_until_the_first_has_left(loop: Loop, config: Config) -> None:
    config = replace(config, evaluation=replace(config.evaluation, sets=config.evaluation.sets[:1]))
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    worker = loop.worker(kind="evaluator", config=config)
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 1))
        with open_store(stored(loop, "0.1", "all"), "somebody else's"):
            await trained(loop, 1)
            service = asyncio.create_task(main(worker))
            await until(lambda: worker.state.startswith("waits for another process"), within_s=20)
        [one] = await told(loop, 1)
        worker.draining.set()
        await service
    assert (one["num"], one["failed"]) == (9, 0)


async def test_an_engine_that_goes_away_in_the_middle_costs_no_answer(loop: Loop, config: Config) -> None:
    config = replace(config, evaluation=replace(config.evaluation, sets=config.evaluation.sets[:1], share=0.05))  # 3 at once
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    worker = loop.worker(kind="evaluator", config=config)
    service = asyncio.create_task(main(worker))
    async with loop.engine(logits, name="slow", delay=TokenDelay(mean_s=0.2, sigma=0.0)) as engine:
        await serve_logits(engine, logits, Version(0, 1))
        await trained(loop, 1)
        await until(lambda: stored(loop, "0.1", "all").is_file() and stored(loop, "0.1", "all").read_bytes().count(b"\n") >= 3, within_s=20)
    async with loop.engine(logits, name="other") as engine:
        await serve_logits(engine, logits, Version(0, 1))
        [one] = await told(loop, 1)
        worker.draining.set()
        await service
    assert (one["num"], one["failed"], one["accuracy"]) == (9, 0, pytest.approx(7 / 9))


@pytest.mark.process
@in_memory
async def test_a_grader_that_hangs_fails_its_answers_and_no_other_set(loop: Loop, config: Config, tmp_path: Path) -> None:
    few = config.evaluation.sets[1]
    sets = (
        replace(few, name="hangs", path=f"{tmp_path}/rows.jsonl@[0:1]", n=2, reward=SetRewardConfig(kind=f"{tmp_path}/grade.py:hangs")),
        replace(few, name="half", reward=SetRewardConfig(kind=f"{tmp_path}/grade.py:half"), pass_reward=0.5),
    )
    config = replace(
        config,
        reward=replace(config.reward, timeout_s=1.0),
        evaluation=replace(config.evaluation, sets=sets),
        producer=replace(config.producer, children=1),
    )
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    worker = loop.worker(kind="evaluator", config=config)
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 1))
        await trained(loop, 1)
        async with loop.serving(main, worker):
            hung, half = await told(loop, 2, within_s=60)
    assert (hung["accuracy"], hung["failed"], hung["answered"], hung["pass"]) == (None, 2, 0, {})
    assert next(iter(hung["reasons"])).startswith("timeout")
    assert (half["accuracy"], half["failed"], half["right"]) == (0.5, 0, 12)


@pytest.mark.process
@in_memory
async def test_rows_with_a_reward_of_their_own_are_scored_and_vote_by_it(loop: Loop, config: Config, tmp_path: Path) -> None:
    """Rows of `gsm8k` in a run of `exact_match`; a set with a reward of its own has that for all its rows."""
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"prompt": "3+4", "label": "7", "grade": "gsm8k"}) + "\n" for _ in range(2)))
    few = replace(config.evaluation.sets[1], path=f"{tmp_path}/own.jsonl", n=2)
    sets = (replace(few, name="own"), replace(few, name="half", reward=SetRewardConfig(kind=f"{tmp_path}/grade.py:half")))
    config = replace(
        config,
        data=replace(config.data, reward_key="grade"),
        evaluation=replace(config.evaluation, sets=sets),
        producer=replace(config.producer, children=1),
    )
    answer = {(0, "<|assistant|>"): "=", (1, "="): "7"}
    logits = script(loop.tokenizer, answer)
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 1))
        await trained(loop, 1)
        async with loop.serving(main, loop.worker(kind="evaluator", config=config)):
            own, half = await told(loop, 2, within_s=60)
    assert (own["accuracy"], own["failed"], half["accuracy"], half["failed"]) == (1.0, 0, 0.5, 0)
    record = json.loads(stored(loop, "0.1", "own").read_text().splitlines()[1])
    assert record["samples"][0]["answer"] == "7" and record["samples"][0]["text"] == "=7"


async def test_no_more_is_asked_for_than_there_is_room_for() -> None:
    slots = 4.0
    room, entered = Room(lambda: slots), list[int]()

    async def takes() -> None:
        for number in range(4):
            await room.take(3)
            entered.append(number)

    taking = asyncio.create_task(takes())
    await asyncio.sleep(0)
    assert entered == [0]
    slots = 9.0  # more engines, seen when the next one ends
    room.give(3)
    await asyncio.sleep(0.01)
    assert entered == [0, 1, 2, 3]
    await taking
    slots = 0.0  # none: one problem is let in, and waits for an engine there
    for _ in range(3):
        room.give(3)
    async with asyncio.timeout(1):
        await room.take(3)
