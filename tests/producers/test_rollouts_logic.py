"""The producer worker under a virtual clock: stand-ins roll out, and all that it stores, counts and reports is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.load import convert
from streamrl.core.lengths import histogram
from streamrl.errors import ConfigError, SchemaError, StreamFull
from streamrl.producers import rollouts
from streamrl.producers.children.graders import Hung
from streamrl.producers.children.jobs import Keeping
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.groups import Group
from streamrl.producers.protocol import Failure
from streamrl.producers.publishing import Publisher
from streamrl.producers.rollouts import Streak, attach, check_reward, main, serve
from streamrl.producers.slots import asked
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import RunRecord
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.images import Image
from streamrl.schemas.samples import LogprobMode, Sample, Tombstone, VersionSpan
from streamrl.schemas.subjects import KEY_RUN, SAMPLES, TASKS, Subjects, kind_of
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.support.tiny import ended
from tests.support.virtual import UNIX_S, at, elapse, virtual

SUBJECTS = Subjects("r")


def episode(rollout: int, *, length: int = 2, **fields: Any) -> Episode:
    model = Segment((7,) * length, (-0.5,) * length, (VersionSpan(length, Version(0, 1)),))
    return Episode(segments=(Segment((1, 2)), model), finish_reason="stop", rollout=rollout, **{"reward": 1.0, **fields})


class Runner:
    """Rolls out as it is told: a task takes a second."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.keeping: list[Keeping] = []
        self.said: list[str] = []
        self.seconds = 1.0
        self.hung: list[float] = []

    async def start(self) -> None:
        self.said.append("start")

    async def close(self) -> None:
        self.said.append("close")

    def hung_s(self) -> list[float]:
        return self.hung

    def take_hung_graders(self) -> Hung:
        return Hung(3, 7.5, 2)

    async def run(self, task: RolloutTask, *, keeping: Keeping) -> Group:
        self.keeping.append(keeping)
        if task.index == 9:
            assert keeping.store is not None and keeping.died is not None
            await keeping.store(0, b"half done")
            await keeping.died()
        await elapse(self.seconds)
        return self.groups.get(task.index, Group((episode(0), episode(1)), ()))


class Pool:
    wait = "waits for engines"

    def __init__(self, scene: Scene) -> None:
        self._scene = scene

    async def found(self) -> None:
        pass

    async def run(self) -> None:
        try:
            await elapse(1e6)
        finally:
            self._scene.said.append("pool ends")


class Speaks:
    """An engine whose three completions have two, two and five tokens."""

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        for completion, length in enumerate((2, 2, 5)):
            yield SimpleNamespace(completion=completion, token_ids=(1,) * length)


class Scene:
    """A worker on the in-process bus, and what it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        given = {"data": {"train": "x"}, "warmup": {"max_steps": 0}, "bus": {"ack_wait_s": 60}, **config}
        self.config = convert(given, where="test")
        self.bus = MemoryBus("r", self.config.bus)
        self.subjects, self.name = SUBJECTS, "producer-0"
        self.draining = asyncio.Event()
        self.state, self.wait = "loading", lambda: "nothing"
        self.detail: Any = lambda: {"host": "h"}
        self.said: list[Any] = []
        self.reports: list[tuple[float, dict[str, float], Any, list[int]]] = []
        self.clocks: list[Any] = []
        self.runner, self.made = Runner(), []
        self.most: list[int] = []
        """How many tasks each claim wanted."""
        claim = self.bus.claim

        async def told(source: str, *, max: int, wait_s: float, stream: str = TASKS) -> Any:
            self.most.append(max)
            return await claim(source, max=max, wait_s=wait_s, stream=stream)

        self.bus.claim = told  # type: ignore[method-assign]
        self.pool = Pool(self)

        def make_runner(*args: Any, **options: Any) -> Runner:
            self.made.append((args, options))
            return self.runner

        monkeypatch.setattr(rollouts, "make_pool", lambda worker: self.pool)
        monkeypatch.setattr(rollouts, "make_runner", make_runner)
        monkeypatch.setattr(rollouts, "keep_all", lambda: self.said.append("keep_all"))
        monkeypatch.setattr(rollouts.encoding, "load", lambda: self.said.append("load"))
        monkeypatch.setattr(rollouts, "policy_tokenizer", lambda worker: ("tokenizer", 5))

    def timed(self, kind: str, clock: Any) -> None:
        self.clocks.append((kind, clock))

    async def metrics(self, values: dict[str, float], lists: Any, *, tasks: Sequence[int]) -> None:
        self.reports.append((at(), values, lists, list(tasks)))

    async def event(self, kind: str, detail: Any) -> None:
        self.said.append((at(), kind, detail))

    async def issue(self, count: int, *, source: str = "main", **fields: Any) -> None:
        for _ in range(count):
            index = (await self.bus.state(TASKS)).last
            task = RolloutTask(**{"run": "r", "index": index, "source": source, "num_rollouts": 2, **fields})
            await self.bus.publish(SUBJECTS.tasks(source), encode(task))

    def drain_at(self, at_s: float) -> None:
        asyncio.get_running_loop().call_later(at_s, self.draining.set)

    async def records(self) -> list[Any]:
        """Samples and tombstones."""
        found: list[Any] = []
        for sequence in range(1, (await self.bus.state(SAMPLES)).last + 1):
            message = await self.bus.fetch(SAMPLES, sequence)
            found += [decode(message.body, Tombstone)] if kind_of(message.subject) == "tombstones" else decode_samples(message.body).rows()
        return found

    def total(self, name: str) -> float:
        return sum(values.get(name, 0) for _, values, _, _ in self.reports)


@pytest.fixture
def scene_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes scenes from sections of the configuration."""
    return partial(Scene, monkeypatch)


async def served(scene: Any, *, until_s: float, sources: Sequence[str] = ("main",), **more: Any) -> int:
    """Serve for so many seconds."""
    asyncio.get_running_loop().call_later(until_s, scene.draining.set)
    return await serve(scene, "f", sources=sources, **more)


@virtual
async def test_tasks_become_samples_and_numbers(scene_of: Any) -> None:
    scene = scene_of(producer={"concurrency": 3})
    await scene.issue(2)
    scene.runner.groups[1] = Group((episode(0, length=4),), (Failure(1, "timeout", "slow"),))
    scene.runner.hung = [4.0, 9.0]
    assert await served(scene, until_s=4.5) == 2
    records = await scene.records()
    samples = [one for one in records if isinstance(one, Sample)]
    assert [(s.task, s.rollout, s.producer, s.claimed_s, s.deliveries) for s in samples] == [
        (0, 0, "producer-0", UNIX_S, 0),
        (0, 1, "producer-0", UNIX_S, 0),
        (1, 0, "producer-0", UNIX_S, 0),
    ]
    [stone] = [one for one in records if isinstance(one, Tombstone)]
    assert (stone.task, stone.rollout, stone.reason, stone.producer, stone.deliveries) == (1, 1, "timeout", "producer-0", 1)
    [(args, options)] = scene.made
    assert args == (scene, scene.pool, "f")
    assert options == {"key": "producer.function", "producer": None, "scores": True, "filters": True}
    assert scene.runner.said == ["start", "close"] and scene.said == ["keep_all", "load", "pool ends"]
    assert [at_s for at_s, *_ in scene.reports] == [2.0, 4.0, 4.5]
    _, values, lists, tasks = scene.reports[0]
    assert values == {
        "producer/tasks_total": 2,
        "producer/failures_total": 0,
        "producer/in_flight_tasks": 0,
        "producer/hung_tasks": 2,
        "producer/hung_s": 9.0,
        "reward/hung": 3,
        "reward/hung_s": 7.5,
        "reward/ended_early_total": 2,
        "producer/rollouts_total": 3,
        "tokens/published_total": 8,
        "tokens/cut_total": 0,
        "bus/redelivered_total": 0,
        "bus/full_total": 0,
    }
    assert lists == {"lengths/finished": histogram([2, 2, 4])} and tasks == []
    assert scene.reports[1][1]["producer/tasks_total"] == 0 and scene.reports[1][2] == {}
    [(kind, clock)] = scene.clocks
    assert kind == "producer" and clock.slots == 3
    shares = clock.take()
    assert clock.take()["setup"] == 0.0 and {"wait_credit", "tools", "publish"} <= set(shares)
    assert scene.detail() == {"host": "h", "tasks": []} and scene.state == "running"


@virtual
async def test_what_is_in_hand_is_told_and_given_back(scene_of: Any) -> None:
    scene = scene_of(producer={"concurrency": 300})
    scene.runner.seconds = 50.0
    await scene.issue(260)
    await scene.issue(2, source="warmup", num_rollouts=2)
    scene.drain_at(2.1)
    serving = asyncio.create_task(serve(scene, "f", sources=("main", "other")))
    await elapse(2.05)
    assert scene.detail()["tasks"] == list(range(256)) and scene.reports[0][3] == list(range(256))
    assert scene.reports[0][1]["producer/in_flight_tasks"] == 260
    assert await serving == 0
    assert len(await scene.bus.claim("main", max=300, wait_s=0.0)) == 260 and scene.reports[-1][1]["producer/failures_total"] == 0


@pytest.mark.parametrize(("again", "cut"), [(False, [5]), (True, [2, 2, 5])])
@virtual
async def test_tokens_that_were_heard_and_not_stored_are_cut(again: bool, cut: list[int], scene_of: Any) -> None:
    """`again`: an earlier delivery had stored the task's samples, so that nothing of this one is."""
    scene = scene_of()
    run = scene.runner.run
    await scene.issue(1)
    if again:
        [lease] = await scene.bus.claim("main", max=1, wait_s=0.0)
        task = decode(lease.body, RolloutTask)
        await Publisher(scene.bus, SUBJECTS).task(task, samples_of(task, [episode(0), episode(1)], producer="p"), [])
        await lease.retry()

    async def heard(task: RolloutTask, *, keeping: Keeping) -> Group:
        async for _ in asked(Speaks()).generate(SimpleNamespace(seeds=(1, 2, 3))):  # type: ignore[arg-type]
            pass
        return await run(task, keeping=keeping)

    scene.runner.run = heard  # type: ignore[method-assign]
    await served(scene, until_s=2.5)
    assert scene.total("tokens/cut_total") == scene.reports[0][1]["tokens/cut_total"] == sum(cut)
    assert scene.reports[0][2]["lengths/cut"] == histogram(cut)


@virtual
async def test_a_task_that_comes_again_has_what_was_kept_of_it(scene_of: Any) -> None:
    scene = scene_of()
    await scene.issue(10)
    for lease in await scene.bus.claim("main", max=10, wait_s=0.0):
        await (lease.retry() if lease.sequence == 10 else lease.done())
    await scene.bus.kv.put("checkpoints/9/1", b"older")
    await scene.bus.kv.put("attempts/9", b"2")
    scene.runner.seconds = 5.0
    await served(scene, until_s=2.0)
    assert [(one.resumes, one.attempts) for one in scene.runner.keeping] == [({1: b"older"}, 2)]
    assert await scene.bus.kv.keys("checkpoints/") == ["checkpoints/9/0", "checkpoints/9/1"]
    assert (await scene.bus.kv.get("attempts/9")).value == b"3"  # type: ignore[union-attr]
    assert scene.total("bus/redelivered_total") == 1
    scene.draining.clear()
    scene.runner.seconds = 0.5
    assert await served(scene, until_s=2.0) == 1
    await elapse(2.0)
    assert scene.runner.keeping[1].resumes == {0: b"half done", 1: b"older"} and scene.runner.keeping[1].attempts == 3
    assert await scene.bus.kv.keys("checkpoints/") == await scene.bus.kv.keys("attempts/") == []
    assert [one.deliveries for one in await scene.records()] == [3, 3]


@virtual
async def test_a_fresh_task_asks_for_nothing_that_was_kept(scene_of: Any) -> None:
    scene = scene_of()
    await scene.issue(1)
    await scene.bus.kv.put("checkpoints/0/1", b"of nobody")
    seen: list[str] = []
    get, keys = scene.bus.kv.get, scene.bus.kv.keys

    async def told(key: str) -> Any:
        seen.append(key)
        return await get(key)

    async def listed(prefix: str = "") -> Any:
        seen.append(prefix)
        return await keys(prefix)

    scene.bus.kv.get, scene.bus.kv.keys = told, listed  # type: ignore[method-assign]
    await served(scene, until_s=1.5)
    [keeping] = scene.runner.keeping
    assert (keeping.resumes, keeping.attempts, keeping.images) == ({}, 0, None) and seen == []


@virtual
async def test_images_of_a_row_are_read_from_the_bus(scene_of: Any) -> None:
    scene = scene_of()
    image = Image("0" * 64, "image/png", 1)
    await scene.issue(1, image_blob=BlobRef("image", "0" * 64, 0, 1), image_rows=(image,))
    await served(scene, until_s=1.5)
    [keeping] = scene.runner.keeping
    assert keeping.images is not None


@pytest.mark.parametrize("keeps", ["experts", "candidates", "neither"])
@virtual
async def test_what_was_recorded_beside_is_stored_before_the_samples(keeps: str, scene_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config: dict[str, Any] = {
        "experts": {"trainer": {"routing_replay": True}},
        "candidates": {"trainer": {"support_replay": True}},
        "neither": {},
    }[keeps]
    scene = scene_of(**config)
    seen: list[Any] = []

    def store(what: str) -> Any:
        async def stored(publisher: Any, samples: Any, episodes: Any) -> Any:
            seen.append((what, len(samples), [one.rollout for one in episodes]))
            return [replace(sample, label=what) for sample in samples]

        return stored

    monkeypatch.setattr(rollouts, "store_experts", store("experts"))
    monkeypatch.setattr(rollouts, "store_candidates", store("candidates"))
    await scene.issue(1)
    await served(scene, until_s=1.5)
    assert seen == ([] if keeps == "neither" else [(keeps, 2, [0, 1])])
    assert [one.label for one in await scene.records()] == [keeps if keeps != "neither" else None] * 2


@virtual
async def test_with_rewarders_what_has_no_reward_is_asked_for(scene_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = scene_of(reward={"workers": 1})

    async def ask(publisher: Any, task: Any, episodes: Any, samples: Any) -> Any:
        assert (task.index, len(episodes), publisher.stalled) == (0, 2, False)
        return [sample for sample in samples if sample.rollout == 0], [Failure(1, "failed", "too large")]

    monkeypatch.setattr(rollouts, "ask_for_rewards", ask)
    await scene.issue(1, num_rollouts=3)
    scene.runner.groups[0] = Group((episode(0), episode(1)), (Failure(2, "timeout", "slow"),))
    await served(scene, until_s=1.5)
    assert scene.made[0][1]["scores"] is False
    records = await scene.records()
    assert [(one.rollout, getattr(one, "reason", "")) for one in records] == [(2, "timeout"), (1, "failed"), (0, "")]


@pytest.mark.parametrize("why", [None, SchemaError("too long"), ConfigError("no template")])
@virtual
async def test_demonstrations_ask_nobody(
    why: Exception | None, caplog: pytest.LogCaptureFixture, scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model": {"max_len": 77}, "data": {"train": "x", "chat_template_kwargs": {"a": 1}}}
    scene = scene_of(producer={"concurrency": 1}, **config)
    seen: list[Any] = []

    def demonstrate(task: RolloutTask, tokenizer: Any, **options: Any) -> Sample:
        seen.append((task.index, tokenizer, options, list(scene.detail()["tasks"])))
        if why is not None:
            raise why
        tokens = np.array([1, 2], np.int32)
        return Sample(
            run="r",
            policy="policy",
            source="warmup",
            task=task.index,
            rollout=0,
            tokens=tokens,
            loss_mask=np.array([0, 1], np.uint8),
            logprobs=np.zeros(2, np.float32),
            spans=(VersionSpan(2, None),),
            logprob_mode=LogprobMode.NONE,
            producer=options["producer"],
        )

    monkeypatch.setattr(rollouts, "demonstration", demonstrate)
    await scene.issue(2, source="warmup", num_rollouts=1, row=8)
    scene.drain_at(1.5)
    assert await serve(scene, "f", sources=("main", "warmup")) == 2
    options = {"end_token": 5, "max_len": 77, "producer": "producer-0", "template_kwargs": {"a": 1}}
    assert [one[:3] for one in seen] == [(0, "tokenizer", options), (1, "tokenizer", options)]
    records = await scene.records()
    assert [(one.task, one.claimed_s) for one in records] == [(0, UNIX_S), (1, UNIX_S)] and scene.runner.keeping == []
    if why is not None:
        assert [(one.rollout, one.reason, one.detail) for one in records] == [(None, "failed", f"row 8: {why.args[0]}")] * 2
        assert caplog.messages[0] == f"event=demonstration_failed task=0 error={why.args[0]}"


@pytest.mark.parametrize(("kind", "source"), [("rl", "warmup"), ("sft", "main")])
@virtual
async def test_many_demonstrations_are_made_at_a_time_and_those_of_a_run_of_sft(kind: str, source: str, scene_of: Any) -> None:
    scene, front = scene_of(producer={"concurrency": 1}, run={"kind": kind} if kind == "sft" else {}), Front()
    await served(scene, until_s=0.2, sources=(source,), front=front, concurrency=7)
    assert scene.most == [256] and not front.heard


class Front:
    """Claims for those who ask; here for nobody, or for two."""

    def __init__(self, wanted: int = 0) -> None:
        self.number, self.heard = wanted, []

    async def rollout(self, task: RolloutTask, context: Any) -> list[Any]:
        raise AssertionError(task)

    def wanted(self) -> int:
        return self.number

    def claimed(self, task: int) -> None:
        self.number -= 1
        self.heard.append(task)

    async def left(self, task: int, ended: bool) -> None:
        pass

    def listen(self, changed: Any, first_open: Any) -> None:
        pass

    def doing(self) -> str:
        return "serves"

    def take_metrics(self) -> dict[str, float]:
        return {"gateway/calls_total": 4}


@virtual
async def test_a_front_has_its_tasks_claimed_and_its_numbers_told(scene_of: Any) -> None:
    scene = scene_of(producer={"concurrency": 1})
    front = Front(2)
    await scene.issue(3)
    await served(scene, until_s=2.5, front=front, concurrency=7)
    assert scene.made[0][1]["producer"] is front and front.heard == [0, 1] and scene.most == [2]
    assert scene.clocks == [] and scene.wait() == "waits for engines"
    scene.pool.wait = ""
    assert scene.wait() == "serves" and scene.reports[0][1]["gateway/calls_total"] == 4
    assert scene.reports[0][1]["producer/hung_s"] == 0.0


@virtual
async def test_greedy_tokens_are_told_where_there_are_some(scene_of: Any) -> None:
    scene = scene_of()
    await scene.issue(1, greedy_baseline=True)
    await served(scene, until_s=2.5)
    assert scene.reports[0][1]["tokens/greedy_total"] == 2 and scene.reports[0][1]["tokens/published_total"] == 2
    assert "tokens/greedy_total" not in scene.reports[1][1]


@virtual
async def test_a_full_stream_is_told_when_it_begins_and_when_it_ends(scene_of: Any) -> None:
    scene = scene_of()
    publish = scene.bus.publish

    async def full(subject: str, body: bytes, **options: Any) -> Any:
        if at() < 5.0:
            raise StreamFull("no room")
        return await publish(subject, body, **options)

    await scene.issue(1)
    scene.bus.publish = full  # type: ignore[method-assign]
    states: list[str] = []
    serving = asyncio.create_task(serve(scene, "f", sources=("main",)))
    for _ in range(5):
        await elapse(2.0 if states else 2.1)
        states.append(scene.state)
    scene.draining.set()
    await serving
    assert states == ["stalled: stream full"] * 3 + ["running"] * 2
    assert scene.said[2:4] == [(2.0, "stalled", {"reason": "stalled: stream full"}), (8.0, "resumed", {"reason": ""})]
    assert scene.total("bus/full_total") == 1


def failed(*details: str, reason: str = "failed") -> Group:
    return Group((), tuple(Failure(n, reason, detail) for n, detail in enumerate(details)))


def test_a_part_of_the_rollouts_that_is_too_great_is_hopeless_too() -> None:
    """Every task gives an episode, so that none has failed."""
    for limit, hopeless in ((0.5, True), (0.8, False)):
        streak = Streak(most=40, limit=limit)
        for _ in range(9):
            streak.tell(Group((episode(0),), tuple(Failure(rollout, "timeout") for rollout in (1, 2, 3))))
            assert not streak.hopeless
        streak.tell(Group((episode(0),), tuple(Failure(rollout, "failed", "no tool") for rollout in (1, 2, 3))))
        assert (streak.length, streak.newest, streak.hopeless) == (0, "no tool", hopeless)


@virtual
async def test_a_streak_is_hopeless_when_it_is_long_in_tasks_and_in_time() -> None:
    streak = Streak()
    assert (streak.length, streak.newest, streak.hopeless) == (0, "", False)
    await elapse(100.0)
    for number in range(64):
        streak.tell(failed("x", f"y{number}"))
    assert (streak.length, streak.newest, streak.hopeless) == (64, "y63", False)
    await elapse(29.5)
    streak.tell(failed("x"))
    assert not streak.hopeless
    await elapse(0.5)
    streak.tell(failed("x"))
    assert streak.hopeless
    streak.tell(Group((episode(0),), (Failure(1, "failed", "x"),)))
    assert (streak.length, streak.hopeless) == (0, True), "once is enough"
    streak = Streak()
    for _ in range(63):
        streak.tell(failed("x"))
    await elapse(31.0)
    for group in (failed("engine: away"), failed("x", reason="timeout")):
        streak.tell(failed("x"))
        assert streak.length == (64 if group.failures[0].detail[0] == "e" else 1) and streak.hopeless
        streak.tell(group)
        assert streak.length == 0, "that is no fault of the code"
    streak.tell(failed("x", reason="filtered"))
    streak.tell(Group((), ()))
    assert streak.length == 0
    streak = Streak()
    for _ in range(62):
        streak.tell(failed("x"))
    await elapse(31.0)
    streak.tell(failed("x"))
    assert (streak.length, streak.hopeless) == (63, False)


@virtual
async def test_an_attached_producer_leaves_when_its_code_fails_or_the_run_has_finished(
    caplog: pytest.LogCaptureFixture, scene_of: Any
) -> None:
    caplog.set_level("INFO")
    scene = scene_of(producer={"concurrency": 2})
    await scene.issue(80)
    scene.runner.groups = {n: failed("broken", "broken") for n in range(80)}
    with pytest.raises(ConfigError) as caught:
        await attach(scene, "x.py:f", source="main")
    assert caught.value.values == {"key": "x.py:f"} and caught.value.message.startswith("64 ") and caught.value.message.endswith(" broken")
    assert at() == pytest.approx(32.0, abs=1.6) and (await scene.bus.state(TASKS)).messages == 80 - 64 - 0
    scene = scene_of()
    await ended(scene.bus, 1)
    await scene.issue(3, source="other")
    attached = asyncio.create_task(attach(scene, "x.py:f", source="other"))
    await elapse(3.0)
    assert not attached.done()
    await scene.bus.publish(SUBJECTS.events("finished"), b"an event decides nothing")
    await elapse(1.0)
    assert not scene.draining.is_set()
    await ended(scene.bus, 2)
    await elapse(1.0)
    assert scene.draining.is_set() and await attached == 3 and "event=run_finished action=leave" in caplog.messages
    scene = scene_of()
    scene.drain_at(1.0)
    await scene.issue(1)
    assert await attach(scene, "x.py:f") == 1


@pytest.mark.parametrize(("steps", "sources"), [(0, ("main",)), (3, ("main", "warmup"))])
@virtual
async def test_the_run_s_own_producer_serves_the_warm_up_too(
    steps: int, sources: tuple[str, ...], scene_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    async def play(*args: Any, **options: Any) -> None:
        seen.append((args, options))

    scene = scene_of(warmup={"max_steps": steps}, producer={"function": "x.py:f"})
    monkeypatch.setattr(rollouts, "serve", play)
    await main(scene)
    assert seen == [((scene, "x.py:f"), {"sources": sources})]
    seen.clear()
    import streamrl.bridges.verifiers.worker as players

    monkeypatch.setattr(players, "main", play)
    scene.config = replace(scene.config, producer=replace(scene.config.producer, function="verifiers:x"))
    await main(scene)
    assert seen == [((scene,), {})]


@virtual
async def test_code_that_judges_is_the_run_s(tmp_path: Path, scene_of: Any) -> None:
    (tmp_path / "mine.py").write_text("def score(task, episode):\n    return 1.0\n")
    reference = f"{tmp_path / 'mine.py'}:score"
    for config, key in (({"reward": {"kind": reference}}, "reward.kind"), ({"filters": {"function": reference}}, "filters.function")):
        scene = scene_of(**config)  # type: ignore[arg-type]
        await check_reward(scene)
        mine = rollouts.code_digests({key: reference})
        record = RunRecord(run="demo", config="", dataset_digest="", num_rows=0, code_version="", fingerprint={}, created_s=0.0)
        for code, refused in ((UNSET, False), ({}, False), (mine, False), ({"data.curriculum": "x"}, False), ({key: "e" * 64}, True)):
            await scene.bus.kv.put(KEY_RUN, encode(replace(record, code=code)))
            if not refused:
                await check_reward(scene)
                continue
            with pytest.raises(ConfigError) as caught:
                await check_reward(scene)
            assert caught.value.values == {"key": key}
            assert "e" * 16 + ")" in caught.value.message and f"(digest {mine[key][:16]})" in caught.value.message
            assert ("the reward that" in caught.value.message) == (key == "reward.kind")
    scene = scene_of()
    await scene.bus.kv.put(KEY_RUN, encode(replace(record, code={"reward.kind": "e" * 64})))
    await check_reward(scene)
