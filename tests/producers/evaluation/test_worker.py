"""The evaluator on several sets, killed and started again, beside another one, with engines that go and graders that hang."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, SetRewardConfig
from streamrl.config.tree import Config, EngineConfig, WarmupConfig, WeightsConfig
from streamrl.consumers.serving import engine_worker
from streamrl.consumers.training.ledger import take_fence
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import BusUnavailable
from streamrl.producers.evaluation.asking import Room
from streamrl.producers.evaluation.schedule import Schedule
from streamrl.producers.evaluation.store import open_store
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

SEVEN = {(0, "<|assistant|>"): "7"}
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


@pytest.fixture
def heldout(config: Config) -> Config:
    """Held-out problems alone: those nine rows, every second version."""
    data = replace(config.data, heldout=config.evaluation.sets[0].path)
    return replace(config, data=data, evaluation=replace(config.evaluation, every=2, num_problems=9, sets=()))


@contextlib.asynccontextmanager
async def sevens(loop: Loop, number: int = 1, answers: Any = SEVEN, **options: Any) -> AsyncIterator[TableEngine]:
    """An engine that answers 7, or as `answers` says, at this version."""
    logits = script(loop.tokenizer, answers)
    async with loop.engine(logits, **options) as engine:
        await serve_logits(engine, logits, Version(0, number))
        yield engine


async def trained(loop: Loop, number: int, *, warm: bool = True) -> None:
    """Write a ledger entry as the trainer does."""
    entry = LedgerEntry(
        run=loop.config.run.name,
        trainer="main",
        version=Version(0, number),
        source="main",
        used=(),
        cursor=0,
        granted=0,
        retired=0,
        warm=warm,
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


@pytest.mark.parametrize(
    ("schedule", "warm_from", "expected"),
    [
        (Schedule(every=10, warmup=True), 7, {7, 17, 27, 37}),
        (Schedule(every=10, warmup=True, done=17), 7, {27, 37}),  # a restart repeats nothing
        (Schedule(every=0, warmup=False), 0, {0}),
    ],
)
def test_counting_begins_where_the_warmup_ends(schedule: Schedule, warm_from: int, expected: set[int]) -> None:
    found = due(schedule)
    for number in range(1, 38):
        schedule.trained(number, warm=number >= warm_from)
        found += due(schedule)
    schedule.finish(39)
    assert [*found, *due(schedule)] == [*((number, False) for number in sorted(expected)), (39, True)]


def test_of_several_that_are_due_only_the_newest_is_done() -> None:
    schedule = Schedule(every=10, warmup=False)
    for number in range(1, 26):
        schedule.trained(number, warm=True)
    assert due(schedule) == [(20, False)]


async def test_the_held_out_problems_are_asked_when_due(loop: Loop, heldout: Config) -> None:
    worker = loop.worker(kind="evaluator", config=heldout)
    wrong = script(loop.tokenizer, {(0, "<|assistant|>"): "6"})
    right = script(loop.tokenizer, SEVEN)
    async with loop.engine(wrong) as engine:
        service = asyncio.create_task(main(worker))
        await trained(loop, 1, warm=False)
        await serve_logits(engine, wrong, Version(0, 2))
        await trained(loop, 2)
        [first] = await told(loop, 1)
        await trained(loop, 3)
        await trained(loop, 4)
        # Version 4 is due but not served yet: the engine holds the problems back until it serves that version or a later one.
        await serve_logits(engine, right, Version(0, 5))
        [_, second] = await told(loop, 2)
        await ended(loop.bus, 5)
        async with asyncio.timeout(60):
            await service
    [_, _, last] = await told(loop, 3)
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
async def test_an_evaluator_says_which_line_of_user_code_blocks(loop: Loop, heldout: Config, tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(BLOCKS)
    heldout = replace(heldout, producer=replace(heldout.producer, function=f"{tmp_path / 'code.py'}:blocks"))
    worker = loop.worker(kind="evaluator", config=heldout)
    async with sevens(loop), loop.serving(main, worker):
        await trained(loop, 1)
        await until(lambda: worker.state.startswith("user code"), within_s=60)
        await worker.present()
        entry = await loop.bus.kv.get(f"{PREFIX_PRESENCE}workers/{worker.name}")
        assert entry is not None and entry.value
        presence = decode(entry.value, WorkerPresence)
        assert "code.py:7 in blocks" in presence.state
        assert isinstance(presence.since_s, float) and time.time() - 60 < presence.since_s <= time.time()


async def test_a_restarted_evaluator_does_what_is_left(loop: Loop, heldout: Config) -> None:
    async with sevens(loop, 3):
        worker = loop.worker(kind="evaluator", config=heldout)
        await trained(loop, 1)
        async with loop.serving(main, worker):
            await told(loop, 1)
        # While it is away the run ends.
        await trained(loop, 2)
        await ended(loop.bus, 2, steps=heldout.run.steps)
        async with asyncio.timeout(60):
            await main(loop.worker(kind="evaluator", config=heldout))
        assert [(e["version"], e["final"]) for e in await told(loop, 2)] == [("0.1", False), ("0.2", True)]
        # The run is resumed with more steps: the former end counts no longer.
        again = loop.worker(kind="evaluator", config=heldout)
        async with loop.serving(main, again):
            await trained(loop, 3)
            assert [(e["version"], e["final"]) for e in await told(loop, 3)][2] == ("0.3", False)


@pytest.mark.parametrize("until_reward", [0.0, 0.5])
async def test_an_end_before_more_steps_is_none(loop: Loop, heldout: Config, until_reward: float) -> None:
    """Whose last evaluation was never done; at the limit of the reward a trainer has begun since."""
    heldout = replace(heldout, run=replace(heldout.run, steps=9, until_reward=until_reward))
    worker = loop.worker(kind="evaluator", config=heldout)
    async with sevens(loop, 3):
        await trained(loop, 1)
        await trained(loop, 2)
        await ended(loop.bus, 2, limit="until_reward" if until_reward else "steps")
        if until_reward:
            await take_fence(loop.bus, "main")
        async with loop.serving(main, worker):
            await told(loop, 1)
            await trained(loop, 3)
            assert [(e["version"], e["final"]) for e in await told(loop, 2)] == [("0.1", False), ("0.3", False)]


async def test_an_end_by_another_limit_is_evaluated_after_a_restart(loop: Loop, heldout: Config) -> None:
    heldout = replace(heldout, run=replace(heldout.run, steps=9, until_reward=0.5))
    worker = loop.worker(kind="evaluator", config=heldout)
    async with sevens(loop, 2):
        await trained(loop, 2)
        await ended(loop.bus, 2, limit="until_reward")
        async with asyncio.timeout(60):
            await main(worker)
        assert [(e["version"], e["final"]) for e in await told(loop, 1)] == [("0.2", True)]


async def test_engines_of_its_own_answer_at_the_version_that_is_due_while_the_others_serve_the_newest(loop: Loop, heldout: Config) -> None:
    """Everything but the trainer is real: both engine workers, the weights and the pins on the bus."""
    heldout = replace(
        heldout, evaluation=replace(heldout.evaluation, engines=1), weights=WeightsConfig(transport="bus", keep=0, anchor_every=3)
    )
    publisher = make_publisher(
        heldout.weights, bus=loop.bus, subjects=loop.subjects, policy="policy", run_dir=loop.run_dir.path, loop=asyncio.get_running_loop()
    )
    for number in range(6):
        logits = script(loop.tokenizer, {(0, "<|assistant|>"): str(number)})
        data = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
        shard = Shard(name="logits", dtype="float32", global_shape=logits.shape, shape=logits.shape, data=data)
        await asyncio.to_thread(publisher.offer, Version(0, number), Content([shard]).digest, [shard])
    await asyncio.to_thread(publisher.close)

    worker = loop.worker(kind="evaluator", config=heldout)
    engines = [loop.worker(index, kind="engine", config=heldout) for index in (0, 1)]
    async with loop.serving(engine_worker.main, engines[0]), loop.serving(engine_worker.main, engines[1]):
        service = asyncio.create_task(main(worker))
        await serving(loop, {"rollout": Version(0, 5)})
        await trained(loop, 1, warm=False)
        await trained(loop, 2)
        [first] = await told(loop, 1)
        await serving(loop, {"rollout": Version(0, 5), "evaluation": Version(0, 2)})
        await trained(loop, 3)
        await trained(loop, 4)
        [_, second] = await told(loop, 2)
        await trained(loop, 5)
        await ended(loop.bus, 5)
        async with asyncio.timeout(60):
            await service
    [_, _, last] = await told(loop, 3)
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


async def test_each_set_is_asked_in_its_own_way_and_when_it_is_due(loop: Loop, config: Config) -> None:
    worker = loop.worker(kind="evaluator", config=config)
    async with sevens(loop, 2):
        service = asyncio.create_task(main(worker))
        await trained(loop, 1)
        await told(loop, 2)
        await trained(loop, 2)
        await told(loop, 3)
        await ended(loop.bus, 2)
        async with asyncio.timeout(60):
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
    path = stored(loop, "0.1", "all")
    async with sevens(loop) as engine:
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
        await serve_logits(engine, script(loop.tokenizer, SEVEN), Version(0, 2))
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
    worker = loop.worker(kind="evaluator", config=config)
    async with sevens(loop):
        with open_store(stored(loop, "0.1", "all"), "somebody else's"):
            await trained(loop, 1)
            service = asyncio.create_task(main(worker))
            await until(lambda: worker.state.startswith("waits for another process"), within_s=60)
        [one] = await told(loop, 1)
        worker.draining.set()
        await service
    assert (one["num"], one["failed"]) == (9, 0)


async def test_an_engine_that_goes_away_in_the_middle_costs_no_answer(loop: Loop, config: Config) -> None:
    config = replace(config, evaluation=replace(config.evaluation, sets=config.evaluation.sets[:1], share=0.05))  # 3 at once
    worker = loop.worker(kind="evaluator", config=config)
    service = asyncio.create_task(main(worker))
    async with sevens(loop, name="slow", delay=TokenDelay(mean_s=0.2, sigma=0.0)):
        await trained(loop, 1)
        await until(lambda: stored(loop, "0.1", "all").is_file() and stored(loop, "0.1", "all").read_bytes().count(b"\n") >= 3, within_s=60)
    async with sevens(loop, name="other"):
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
    worker = loop.worker(kind="evaluator", config=config)
    async with sevens(loop):
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
    async with sevens(loop, answers={(0, "<|assistant|>"): "=", (1, "="): "7"}):
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
    async with asyncio.timeout(60):
        await taking
    assert entered == [0, 1, 2, 3]
    slots = 0.0  # none: one problem is let in, and waits for an engine there
    for _ in range(3):
        room.give(3)
    async with asyncio.timeout(60):
        await room.take(3)
