"""The reaper under a virtual clock: which tasks it ends, how long it waits for the fold, and how it rests."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Message, Receipt, StreamState
from streamrl.consumers.training import reaper as reapers
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.reaper import Reaper
from streamrl.core.fold import fold
from streamrl.core.records import judge
from streamrl.core.state import FoldConfig, FoldState, initial_state
from streamrl.errors import BusUnavailable, Fenced, StreamFull
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.digests import body_digest
from streamrl.schemas.samples import RewardUpdate, Tombstone
from streamrl.schemas.subjects import GRADING, PREFIX_FENCES, SAMPLES, TASKS, Subjects
from streamrl.schemas.tasks import RolloutTask
from tests.support.bad_messages import patched, template
from tests.support.virtual import at, elapse, virtual

SUBJECTS = Subjects("r")
CONFIG = FoldConfig(batch_tasks=40, max_staleness=1, group_size=2)
DETAIL = "nobody holds it, it is not in the queue, and the stream has no end of it"
UNSCORED = "nobody scores it: the request for its reward is not in the queue, and no answer came"


class Scene(MemoryBus):
    """A run's queues and its fold, without anybody who works; calls of the bus may fail."""

    def __init__(self, config: FoldConfig = CONFIG) -> None:
        super().__init__("r")
        self.config, self.folded = config, initial_state(config)
        self.ids: list[str | None] = []
        self.headers: list[Any] = []
        self.asked: list[int] = []
        self.most_at_once = self._at_once = 0
        self.away: dict[str, Exception] = {}
        self.slow_s = 0.0

    def state_now(self) -> FoldState:
        return self.folded

    async def publish(self, subject: str, body: bytes, **options: Any) -> Receipt:
        if error := self.away.get("publish"):
            raise error
        self.ids.append(options.get("id"))
        self.headers.append(options.get("headers"))
        return await super().publish(subject, body, **options)

    async def state(self, stream: str) -> StreamState:
        if error := self.away.get(stream):
            raise error
        await elapse(self.slow_s)
        return await super().state(stream)

    async def fetch(self, stream: str, sequence: int) -> Message:
        if stream == TASKS:
            self.asked.append(sequence - 1)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            await asyncio.sleep(0.0)
            self._at_once -= 1
        return await super().fetch(stream, sequence)

    async def issue(self, count: int, *, taken: Sequence[int] = ()) -> None:
        for index in range(count):
            await super().publish(SUBJECTS.tasks("main"), encode(RolloutTask(run="r", index=index, source="main", num_rollouts=2)))
        await self.take(*taken)

    async def take(self, *tasks: int) -> None:
        for lease in await self.claim("main", max=1000, wait_s=0.0):
            await (lease.done() if lease.sequence - 1 in tasks else lease.retry())

    async def end(self, task: int, rollout: int | None = None) -> None:
        stone = Tombstone(task=task, reason="failed", rollout=rollout, group_size=2, source="main")
        await super().publish(SUBJECTS.tombstones("main"), encode(stone))

    async def samples(self, task: int, rollouts: tuple[int, ...], grading: Any = UNSET, source: str = "main") -> None:
        body = patched(template(rollouts, reward=None, group_size=2, grading=grading, source=source), task, 0)
        await super().publish(SUBJECTS.samples(source), body)

    async def fold(self, most: int = 1000) -> None:
        for sequence in range(self.folded.cursor + 1, (await super().state(SAMPLES)).last + 1)[:most]:
            message = await self.fetch(SAMPLES, sequence)
            record, _ = judge(message.subject, sequence, message.body, message.headers.get("Streamrl-Task"))
            self.folded, _ = fold(self.folded, record, self.config)

    async def reaper(self) -> Reaper:
        return Reaper(self, SUBJECTS, "main", await take_fence(self, "main"), self.state_now, self.config)

    async def stones(self) -> list[tuple[str, Tombstone]]:
        """Return what the reaper has stored, under which ids."""
        last = (await super().state(SAMPLES)).last
        messages = [await self.fetch(SAMPLES, n) for n in range(last - len(self.ids) + 1, last + 1)]
        for message, headers in zip(messages, self.headers, strict=True):
            stone = decode(message.body, Tombstone)
            assert headers == {"Streamrl-Task": str(stone.task), "Streamrl-Digest": body_digest(message.body)}
            assert message.subject == f"r.tombstones.{stone.source}"
        return [(str(id), decode(message.body, Tombstone)) for id, message in zip(self.ids, messages, strict=True)]


def lost(task: int, source: str = "main") -> tuple[str, Tombstone]:
    return f"lost-{task}", Tombstone(task=task, reason="lost", detail=DETAIL, source=source)


@pytest.mark.parametrize(
    ("issued", "taken", "ended", "found", "asked"),
    [
        (0, [], [], (), []),
        (3, [], [], (), [0, 1, 2]),
        (3, [0], [], (0,), [1, 2]),
        (3, [0, 1], [], (0, 1), [2]),
        (3, [0, 1], [0], (1,), [2]),
        (3, [1], [], (1,), [0, 1, 2]),
        (3, [0, 2], [], (0, 2), [1, 2]),
        (3, [0, 1, 2], [0, 2], (1,), []),
        (3, [0, 1, 2], [0, 1, 2], (), []),
        (3, [1], [0], (1,), [1, 2]),
        (3, [1], [1], (), [0, 2]),
    ],
)
@virtual
async def test_what_nobody_holds_and_nothing_has_ended_is_lost(
    issued: int, taken: list[int], ended: list[int], found: tuple[int, ...], asked: list[int]
) -> None:
    scene = Scene()
    await scene.issue(issued, taken=taken)
    for task in ended:
        await scene.end(task)
    await scene.fold()
    reaper = await scene.reaper()
    assert await reaper.look() == found and scene.asked == asked
    assert await scene.stones() == [lost(task) for task in found]
    await scene.fold()
    assert await reaper.look() == () and at() == 0.0


@virtual
async def test_only_granted_tasks_are_looked_at_and_so_many_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await scene.issue(84, taken=range(1, 84, 2))
    assert await (await scene.reaper()).look() == tuple(range(1, 80, 2)), "80 are granted"
    assert scene.asked == list(range(80)) and scene.most_at_once == 32
    assert caplog.messages[0] == "event=task_lost task=1 source=main"


@pytest.mark.parametrize(("warmup", "source"), [(0, "main"), (3, "warmup")])
@virtual
async def test_a_lost_task_ends_under_its_source(warmup: int, source: str) -> None:
    scene = Scene(FoldConfig(batch_tasks=2, max_staleness=1, group_size=2, warmup_steps=warmup))
    await scene.issue(3, taken=[0, 1])
    if not warmup:
        await scene.samples(1, (0,), source="other")
        await scene.fold()
    assert await (await scene.reaper()).look() == (0, 1)
    assert await scene.stones() == [lost(0, source), lost(1, source if warmup else "other")]


@virtual
async def test_what_has_come_meanwhile_is_waited_for_and_counts() -> None:
    scene = Scene()
    await scene.issue(4, taken=[0, 1, 2])
    await scene.end(0)
    looking = asyncio.create_task((await scene.reaper()).look())
    await elapse(3.05)
    assert not looking.done() and scene.ids == []
    await scene.fold()
    assert await looking == (1, 2) and at() == 3.1


@pytest.mark.parametrize(("left", "ends_at"), [(0, 5.0), (1, 9.25)])
@virtual
async def test_an_end_of_the_stream_that_is_lost_is_not_waited_for(left: int, ends_at: float) -> None:
    """The cursor is moved at 4.25 s; what is behind it is looked for five seconds after it was seen to move."""
    scene = Scene()
    await scene.issue(2, taken=[0])
    for _ in range(2):
        await scene.end(1)
    reaper = await scene.reaper()

    looking = asyncio.create_task(reaper.look())
    if left:
        await elapse(4.25)
        await scene.fold(1)
    await scene.trim(SAMPLES, through=2)
    assert await looking == (0,)
    assert at() == pytest.approx(ends_at, abs=0.16)


@virtual
async def test_a_message_that_is_there_is_waited_for_however_long() -> None:
    scene = Scene()
    await scene.issue(2, taken=[0])
    await scene.end(1)
    asked: list[tuple[float, str, int]] = []
    first_from = scene.first_from

    async def counted(stream: str, sequence: int, *, subject: str | None = None) -> Message | None:
        asked.append((at(), stream, sequence))
        return await first_from(stream, sequence, subject=subject)

    scene.first_from = counted  # type: ignore[method-assign]
    looking = asyncio.create_task((await scene.reaper()).look())
    await elapse(0.2)
    await scene.publish(SUBJECTS.rewards, b"behind the end that is waited for")
    await elapse(16.8)
    assert not looking.done() and [(round(at_s), *rest) for at_s, *rest in asked] == [(n, SAMPLES, 1) for n in (5, 10, 15)]
    await scene.trim(SAMPLES, through=1)
    assert await looking == (0,) and at() == pytest.approx(20.0, abs=0.35)


@virtual
async def test_rollouts_whose_request_for_a_reward_is_gone_end() -> None:
    """Requests 1 (acknowledged), 2 and 3 (queued); 4 was never stored. Task 4 has its reward, task 5 asks for none."""
    scene = Scene()
    await scene.issue(6)
    for _ in range(3):
        await MemoryBus.publish(scene, SUBJECTS.grading("main"), b"x")
    for task, grading in enumerate((1, 2, 3, 4, 1, UNSET)):
        await scene.samples(task, (0,), grading)
    await MemoryBus.publish(scene, SUBJECTS.rewards, encode(RewardUpdate(task=4, rollout=0, reward=1.0, grading=1)))
    await scene.fold()
    reaper = await scene.reaper()
    for lease in await scene.claim("main", max=1, wait_s=0.0, stream=GRADING):
        await lease.done()
    assert await reaper.look() == ()
    unscored = Tombstone(task=0, reason="lost", rollout=0, group_size=2, detail=UNSCORED, source="main")
    ended = [(f"lost-{task}.0.g{grading}", replace(unscored, task=task, grading=grading)) for task, grading in ((0, 1), (3, 4))]
    assert await scene.stones() == ended


@virtual
async def test_nothing_is_waited_for_where_all_have_their_rewards() -> None:
    scene = Scene()
    await scene.issue(1)
    await scene.samples(0, (0,), 7)
    await MemoryBus.publish(scene, SUBJECTS.rewards, encode(RewardUpdate(task=0, rollout=0, reward=1.0, grading=7)))
    await scene.fold()
    await scene.end(0, 1)
    assert await (await scene.reaper()).look() == () and at() == 0.0


@pytest.mark.parametrize("answer", ["reward", "another request", "the end of the task", "nothing"])
@virtual
async def test_a_rollout_that_is_answered_meanwhile_does_not_end(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await scene.issue(1)
    await scene.samples(0, (1,), 7)
    await scene.fold()
    looking = asyncio.create_task((await scene.reaper()).look())
    match answer:
        case "reward":
            await MemoryBus.publish(scene, SUBJECTS.rewards, encode(RewardUpdate(task=0, rollout=1, reward=1.0, grading=7)))
        case "another request":
            known = scene.folded.pending[0]
            other = replace(known, rollouts={1: replace(known.rollouts[1], grading=8)})
            later = replace(scene.folded, pending={0: other})
            scene.state_now = iter_states([scene.folded, later]).__next__  # type: ignore[method-assign]
            looking.cancel()
            looking = asyncio.create_task((await scene.reaper()).look())
        case "the end of the task":
            await scene.end(0)
        case _:
            pass
    await asyncio.sleep(0.0)
    if answer != "another request":
        await scene.fold()
    assert await looking == ()
    assert [id for id, _ in await scene.stones()] == (["lost-0.1.g7"] if answer == "nothing" else [])
    assert caplog.messages == (["event=reward_lost task=0 rollout=1 grading=7"] if answer == "nothing" else [])


def iter_states(states: list[FoldState]) -> Any:
    """The first once, then the last for ever."""
    yield states[0]
    while True:
        yield states[-1]


@pytest.mark.parametrize("value", [b"0", b"2", None])
@virtual
async def test_without_its_fence_it_ends_nothing(value: bytes | None) -> None:
    scene = Scene()
    await scene.issue(1, taken=[0])
    reaper = await scene.reaper()
    if value is None:
        await scene.kv.delete(PREFIX_FENCES + "main")
    else:
        await scene.kv.put(PREFIX_FENCES + "main", value)
    with pytest.raises(Fenced) as caught:
        await reaper.look()
    assert caught.value.values == {"fence": 1} and scene.ids == []
    with pytest.raises(Fenced):
        await reaper.last_look()


@virtual
async def test_after_the_last_version_it_folds_what_is_left_itself(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await scene.issue(5, taken=[0, 1, 2, 3])
    await scene.end(0)
    await scene.fold()
    await scene.end(1)
    await scene.end(2, 1)
    reaper, before = await scene.reaper(), scene.folded
    scene.away["publish"] = BusUnavailable("away")
    await reaper.last_look()
    assert caplog.messages == ["event=reaper_failed at=end error=away"]
    scene.away.clear()
    await reaper.last_look()
    assert await scene.stones() == [lost(2), lost(3)] and scene.folded is before and at() == 0.0


@virtual
async def test_what_is_stored_of_a_lost_task_goes_before_its_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await scene.issue(3, taken=[0, 1])
    for key in ("checkpoints/0/0", "attempts/0", "attempts/2"):
        await scene.kv.put(key, b"1")
    for key in ("0/1", "01/1"):
        await scene.turns.put(key, b"1")
    scene.away["publish"] = BusUnavailable("away")
    with pytest.raises(BusUnavailable):
        await (await scene.reaper()).look()
    await elapse(2.0)
    assert await scene.kv.keys("checkpoints/") == [] and await scene.kv.keys("attempts/") == ["attempts/2"]
    assert await scene.turns.keys() == ["01/1"]
    scene.away.clear()

    async def away(prefix: str) -> None:
        raise BusUnavailable("away")

    scene.turns.remove = away  # type: ignore[method-assign]
    assert await (await scene.reaper()).look() == (0, 1)
    assert caplog.messages[0] == "event=task_keys_left_behind task=0 error=away"


@virtual
async def test_a_full_stream_is_trimmed_and_the_look_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene, trimmed = Scene(), []

    async def trim(bus: Any) -> None:
        trimmed.append(bus)

    monkeypatch.setattr(reapers, "trim_if_full", trim)
    await scene.issue(1, taken=[0])
    scene.away["publish"] = StreamFull("no room")
    with pytest.raises(StreamFull):
        await (await scene.reaper()).look()
    assert trimmed == [scene]


@pytest.mark.parametrize(("slow_s", "every_s"), [(0.0, 5.0), (0.4, 5.4), (1.0, 11.0), (9.0, 24.0)])
@virtual
async def test_it_rests_the_longer_the_longer_it_looks(slow_s: float, every_s: float, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene, looks = Scene(), []
    reaper = await scene.reaper()
    look = reaper.look

    async def counted() -> Any:
        looks.append(at())
        if len(looks) == 2:
            raise BusUnavailable("away")
        return await look()

    reaper.look = counted  # type: ignore[method-assign,assignment]
    scene.slow_s = slow_s
    caplog.clear()
    running = reaper.start(asyncio.get_running_loop())
    await elapse(every_s + 5.0 + every_s + 0.1)
    assert looks == pytest.approx([0.0, every_s, every_s + 5.0, 2 * every_s + 5.0])
    running.cancel()
    await asyncio.sleep(0.0)
    assert caplog.messages == ["event=reaper_failed error=away"] and running.cancelled()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Fenced("there is another"), "event=reaper_done reason=fenced error=there is another"),
        (ZeroDivisionError("by nothing"), "event=reaper_ended error=by nothing"),
    ],
)
@virtual
async def test_it_ends_where_another_has_taken_over_and_says_what_else_ends_it(error: Exception, said: str, caplog: Any) -> None:
    caplog.set_level("INFO")
    scene = Scene()
    reaper = await scene.reaper()
    caplog.clear()
    scene.away[TASKS] = error
    running = reaper.start(asyncio.get_running_loop())
    await elapse(1.0)
    assert running.done() and caplog.messages == [said]
    assert (caplog.records[0].exc_info or (None, None))[1] is (None if isinstance(error, Fenced) else error)
