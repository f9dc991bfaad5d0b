from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config.tree import Config, EngineConfig, EvaluationConfig, WarmupConfig, WeightsConfig
from streamrl.consumers.serving import engine_worker
from streamrl.consumers.training.ledger import take_fence
from streamrl.producers.evaluation.schedule import Schedule
from streamrl.producers.evaluation.worker import main
from streamrl.runtime.kinds import num_workers
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, WorkerPresence
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import EVENTS, PREFIX_PRESENCE
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.weights.factory import make_publisher
from streamrl.weights.manifest import Content
from streamrl.weights.protocol import Shard
from tests.support.policies import script, serve_logits
from tests.support.processes import until
from tests.support.producing import Loop, in_memory
from tests.support.tiny import ended

BLOCKS = """import time


async def blocks(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    time.sleep(0.3)
    return chat.episode()
"""


def due(schedule: Schedule) -> list[tuple[int, bool]]:
    """Everything that is due now."""
    found = []
    while (next_due := schedule.take()) is not None:
        found.append(next_due)
        if next_due[1]:
            break
    return found


def test_without_a_warmup_version_0_is_first() -> None:
    schedule = Schedule(every=0, warmup=False)
    assert due(schedule) == [(0, False)]
    schedule.trained(1, warm=True)
    assert due(schedule) == []
    schedule.finish(1)
    assert due(schedule) == [(1, True)]


def test_with_a_warmup_its_end_is_first_and_counting_begins_there() -> None:
    schedule = Schedule(every=10, warmup=True)
    for number in range(1, 38):
        schedule.trained(number, warm=number >= 7)
        assert due(schedule) == ([(number, False)] if number in (7, 17, 27, 37) else [])


def test_of_several_that_are_due_only_the_newest_is_done() -> None:
    schedule = Schedule(every=10, warmup=False)
    for number in range(1, 26):
        schedule.trained(number, warm=True)
    assert due(schedule) == [(20, False)]


def test_a_restart_repeats_nothing() -> None:
    schedule = Schedule(every=10, warmup=True, done=17)
    for number in range(1, 20):
        schedule.trained(number, warm=number >= 7)
    assert due(schedule) == []
    for number in range(20, 28):
        schedule.trained(number, warm=True)
    assert due(schedule) == [(27, False)]


@pytest.fixture
def config(loop: Loop, tmp_path: Path) -> Config:
    """Ten held-out problems, 3+4 each, two of which have another label."""
    rows = [{"prompt": "3+4", "label": "7" if index not in (1, 5) else "8"} for index in range(10)]
    path = tmp_path / "heldout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return replace(
        loop.config,
        data=replace(loop.config.data, heldout=str(path)),
        warmup=WarmupConfig(max_steps=5),
        evaluation=EvaluationConfig(every=2, num_problems=9, sampling=Sampling(temperature=0.0, max_new_tokens=500)),
    )


async def trained(loop: Loop, config: Config, number: int, *, warm: bool) -> None:
    """A ledger entry as the trainer writes it."""
    entry = LedgerEntry(
        run=config.run.name, trainer="main", version=Version(0, number), source="main", used=(), cursor=0, granted=0, retired=0, warm=warm
    )
    await loop.bus.publish(loop.subjects.ledger("main"), encode(entry), id=str(number))


async def evaluations(loop: Loop, count: int) -> list[dict[str, Any]]:
    """The details of the first `count` evaluations, waiting for them."""
    found = []
    async with asyncio.timeout(20):
        async for message in loop.bus.read(EVENTS, after=0, subject=loop.subjects.events("evaluation")):
            found.append(decode(message.body, Event).detail)
            if len(found) == count:
                break
    return found


async def test_the_held_out_problems_are_asked_when_due(loop: Loop, config: Config) -> None:
    worker = loop.worker(kind="evaluator", config=config)
    wrong = script(loop.tokenizer, {(0, "<|assistant|>"): "6"})
    right = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    async with loop.engine(wrong) as engine:
        service = asyncio.create_task(main(worker))
        await trained(loop, config, 1, warm=False)
        await serve_logits(engine, wrong, Version(0, 2))
        await trained(loop, config, 2, warm=True)
        [first] = await evaluations(loop, 1)
        await trained(loop, config, 3, warm=True)
        await trained(loop, config, 4, warm=True)
        # Version 4 is due but not served yet: the engine holds the problems back until it serves that version or a later one.
        await serve_logits(engine, right, Version(0, 5))
        [_, second] = await evaluations(loop, 2)
        await ended(loop.bus, 5)
        async with asyncio.timeout(20):
            await service
    [_, _, last] = await evaluations(loop, 3)
    assert (first["version"], first["versions"], first["accuracy"], first["final"]) == ("0.2", ["0.2", "0.2"], 0.0, False)
    assert first["num"] == 9 and first["failed"] == 0
    assert first["problems"][:2] == [
        {"prompt": "3+4", "expected": "7", "got": "6", "reward": 0.0},
        {"prompt": "3+4", "expected": "8", "got": "6", "reward": 0.0},
    ]
    assert len(first["problems"]) == 8
    assert (second["version"], second["versions"], second["accuracy"]) == ("0.4", ["0.5", "0.5"], pytest.approx(7 / 9))
    assert (last["version"], last["final"], last["accuracy"]) == ("0.5", True, pytest.approx(7 / 9))


@pytest.mark.process
@in_memory
async def test_an_evaluator_says_which_line_of_user_code_blocks(loop: Loop, config: Config, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(BLOCKS)
    config = replace(config, producer=replace(config.producer, function=f"{tmp_path / 'code.py'}:blocks"))
    worker = loop.worker(kind="evaluator", config=config)
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    async with loop.engine(logits) as engine, loop.serving(main, worker):
        await serve_logits(engine, logits, Version(0, 1))
        await trained(loop, config, 1, warm=True)
        await until(lambda: worker.state.startswith("user code"), within_s=60)
        await worker.present()
        entry = await loop.bus.kv.get(f"{PREFIX_PRESENCE}workers/{worker.name}")
        assert entry is not None and entry.value
        presence = decode(entry.value, WorkerPresence)
        assert "code.py:7 in blocks" in presence.state
        assert isinstance(presence.since_s, float) and time.time() - 60 < presence.since_s <= time.time()


async def test_a_restarted_evaluator_does_what_is_left(loop: Loop, config: Config) -> None:
    async with loop.engine(script(loop.tokenizer, {(0, "<|assistant|>"): "7"})) as engine:
        await serve_logits(engine, script(loop.tokenizer, {(0, "<|assistant|>"): "7"}), Version(0, 3))
        worker = loop.worker(kind="evaluator", config=config)
        await trained(loop, config, 1, warm=True)
        async with loop.serving(main, worker):
            await evaluations(loop, 1)
        # While it is away the run ends.
        await trained(loop, config, 2, warm=True)
        await ended(loop.bus, 2, steps=config.run.steps)
        async with asyncio.timeout(20):
            await main(loop.worker(kind="evaluator", config=config))
        assert [(e["version"], e["final"]) for e in await evaluations(loop, 2)] == [("0.1", False), ("0.2", True)]
        # The run is resumed with more steps: the former end counts no longer.
        again = loop.worker(kind="evaluator", config=config)
        async with loop.serving(main, again):
            await trained(loop, config, 3, warm=True)
            assert [(e["version"], e["final"]) for e in await evaluations(loop, 3)][2] == ("0.3", False)


@pytest.mark.parametrize("until_reward", [0.0, 0.5])
async def test_an_end_before_more_steps_is_none(loop: Loop, config: Config, until_reward: float) -> None:
    """Whose last evaluation was never done; at the limit of the reward a trainer has begun since."""
    config = replace(config, run=replace(config.run, steps=9, until_reward=until_reward))
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    worker = loop.worker(kind="evaluator", config=config)
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 3))
        await trained(loop, config, 1, warm=True)
        await trained(loop, config, 2, warm=True)
        await ended(loop.bus, 2, limit="until_reward" if until_reward else "steps")
        if until_reward:
            await take_fence(loop.bus, "main")
        async with loop.serving(main, worker):
            await evaluations(loop, 1)
            await trained(loop, config, 3, warm=True)
            assert [(e["version"], e["final"]) for e in await evaluations(loop, 2)] == [("0.1", False), ("0.3", False)]


async def test_an_end_by_another_limit_is_evaluated_after_a_restart(loop: Loop, config: Config) -> None:
    config = replace(config, run=replace(config.run, steps=9, until_reward=0.5))
    logits = script(loop.tokenizer, {(0, "<|assistant|>"): "7"})
    worker = loop.worker(kind="evaluator", config=config)
    async with loop.engine(logits) as engine:
        await serve_logits(engine, logits, Version(0, 2))
        await trained(loop, config, 2, warm=True)
        await ended(loop.bus, 2, limit="until_reward")
        async with asyncio.timeout(20):
            await main(worker)
        assert [(e["version"], e["final"]) for e in await evaluations(loop, 1)] == [("0.2", True)]


async def test_engines_of_its_own_answer_at_the_version_that_is_due_while_the_others_serve_the_newest(loop: Loop, config: Config) -> None:
    """Everything but the trainer is real: both engine workers, the weights and the pins on the bus."""
    config = replace(
        config, evaluation=replace(config.evaluation, engines=1), weights=WeightsConfig(transport="bus", keep=0, anchor_every=3)
    )
    publisher = make_publisher(
        config.weights,
        bus=loop.bus,
        subjects=loop.subjects,
        policy="policy",
        run_dir=loop.run_dir.path,
        loop=asyncio.get_running_loop(),
    )
    for number in range(6):
        logits = script(loop.tokenizer, {(0, "<|assistant|>"): str(number)})
        data = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
        shard = Shard(name="logits", dtype="float32", global_shape=logits.shape, shape=logits.shape, data=data)
        await asyncio.to_thread(publisher.offer, Version(0, number), Content([shard]).digest, [shard])
    await asyncio.to_thread(publisher.close)

    worker = loop.worker(kind="evaluator", config=config)
    engines = [loop.worker(index, kind="engine", config=config) for index in (0, 1)]
    async with loop.serving(engine_worker.main, engines[0]), loop.serving(engine_worker.main, engines[1]):
        service = asyncio.create_task(main(worker))
        await serving(loop, {"rollout": Version(0, 5)})
        await trained(loop, config, 1, warm=False)
        await trained(loop, config, 2, warm=True)
        [first] = await evaluations(loop, 1)
        await serving(loop, {"rollout": Version(0, 5), "evaluation": Version(0, 2)})
        await trained(loop, config, 3, warm=True)
        await trained(loop, config, 4, warm=True)
        [_, second] = await evaluations(loop, 2)
        await trained(loop, config, 5, warm=True)
        await ended(loop.bus, 5)
        async with asyncio.timeout(20):
            await service
    [_, _, last] = await evaluations(loop, 3)
    for detail, number in ((first, 2), (second, 4), (last, 5)):
        assert (detail["version"], detail["versions"]) == (f"0.{number}", [f"0.{number}"] * 2)
        assert [problem["got"] for problem in detail["problems"]] == [str(number)] * 8
    assert not await loop.bus.kv.keys("pins/")


async def serving(loop: Loop, expected: dict[str, Version]) -> None:
    """Wait until the engine of each role announces that it serves this version."""
    async with asyncio.timeout(30):
        while True:
            entries = [await loop.bus.kv.get(key) for key in await loop.bus.kv.keys("presence/engines/")]
            found = [decode(entry.value, EnginePresence) for entry in entries if entry and entry.value]
            if expected.items() <= {presence.role: presence.serving for presence in found}.items():
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(("index", "role"), [(0, "rollout"), (1, "rollout"), (2, "evaluation"), (3, "evaluation"), (4, "rollout")])
def test_the_engines_behind_the_runs_own_are_for_evaluations(index: int, role: str) -> None:
    """One that joins by hand gets an index behind all of them, and serves rollouts."""
    config = Config(engine=EngineConfig(workers=2), evaluation=EvaluationConfig(engines=2))
    assert engine_worker.role_of(config, index) == role
    assert num_workers(config, "engine") == 4
