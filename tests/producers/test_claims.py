"""Claims under a virtual clock: when a task is claimed, kept, given back, and taken off the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Lease
from streamrl.config.tree import BusConfig
from streamrl.errors import BusUnavailable, EngineError
from streamrl.producers.claims import Claims
from streamrl.producers.protocol import Claim
from streamrl.producers.publishing import Publisher
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import GRADING, KEY_GRANTED, SAMPLES, TASKS, Subjects
from streamrl.schemas.tasks import Refused, RolloutTask
from tests.support.virtual import UNIX_S, at, elapse, virtual

SUBJECTS = Subjects("r")
ACK_WAIT_S = 6.0


class Held:
    """A lease that tells what is asked of it, and does it as `Scene.answers` says."""

    def __init__(self, lease: Lease, scene: Scene) -> None:
        self._lease, self._scene = lease, scene
        self.body, self.sequence, self.deliveries, self.stored_s = lease.body, lease.sequence, lease.deliveries, lease.stored_s

    async def _do(self, what: str, *args: float) -> None:
        self._scene.told.append((at(), what, self.sequence - 1, *args))
        await self._scene.answers.get(what, _nothing)()
        await getattr(self._lease, what)(*args)

    async def keep(self) -> None:
        await self._do("keep")

    async def done(self) -> None:
        await self._do("done")

    async def retry(self, delay_s: float = 0.0) -> None:
        await self._do("retry", delay_s)


async def _nothing() -> None:
    pass


class Scene(MemoryBus):
    """A bus with tasks, and somebody who works on them; all that happens is told with its time."""

    def __init__(self) -> None:
        super().__init__("r", BusConfig(ack_wait_s=ACK_WAIT_S))
        self.told: list[tuple[Any, ...]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.answers: dict[str, Callable[[], Awaitable[None]]] = {}
        self.seconds: dict[int, float] = {}
        self.draining = asyncio.Event()

    async def claim(self, source: str, *, max: int, wait_s: float, stream: str = TASKS) -> Sequence[Any]:
        self.asked.append((source, max, wait_s, stream))
        return [Held(lease, self) for lease in await super().claim(source, max=max, wait_s=wait_s, stream=stream)]

    async def issue(self, count: int, **fields: Any) -> None:
        for index in range((await self.state(TASKS)).last, (await self.state(TASKS)).last + count):
            await self.publish(SUBJECTS.tasks("main"), encode(RolloutTask(run="r", index=index, source="main", num_rollouts=2, **fields)))

    async def work(self, task: RolloutTask, claim: Claim) -> None:
        self.told.append((at(), "work", task.index))
        try:
            await elapse(self.seconds.get(task.index, 1.0))
        except asyncio.CancelledError:
            self.told.append((at(), "cut", task.index))
            raise

    async def let_go(self, task: int, ended: bool) -> None:
        self.told.append((at(), "let_go", task, ended))

    def claims(self, *, work: Any = None, concurrency: int = 4, **options: Any) -> Claims:
        publisher = Publisher(self, SUBJECTS, producer="p")
        return Claims(self, publisher, "main", work or self.work, concurrency=concurrency, ack_wait_s=ACK_WAIT_S, **options)

    async def drained(self, claims: Claims, *, at_s: float) -> None:
        """Run until so many seconds have gone, and drain."""
        asyncio.get_running_loop().call_later(at_s, self.draining.set)
        await claims.run(self.draining)

    async def left(self) -> int:
        return (await self.state(TASKS)).messages

    async def stones(self) -> list[Tombstone]:
        return [decode((await self.fetch(SAMPLES, n)).body, Tombstone) for n in range(1, (await self.state(SAMPLES)).last + 1)]

    async def ends(self, first_open: Any) -> None:
        await self.kv.put(KEY_GRANTED, first_open if isinstance(first_open, bytes) else encode(Grant(9, 0, 0, 0, first_open)))


def line(told: Sequence[tuple[Any, ...]]) -> str:
    """Write what was told in a line: the time, what, which task, and what else."""
    return ",".join(":".join(f"{word:g}" if isinstance(word, float) else str(word) for word in one) for one in told)


def counted(claims: Claims) -> tuple[int, int, int]:
    """Done, failures, delivered again since the last call."""
    counts = claims.take_counts()
    return counts.num_done, counts.num_failures, counts.num_redelivered


@virtual
async def test_so_many_are_worked_on_at_a_time_and_leave_the_queue_when_they_are_done() -> None:
    scene = Scene()
    scene.seconds = {0: 3.0, 1: 1.0}
    given: list[tuple[int, Claim]] = []

    async def work(task: RolloutTask, claim: Claim) -> None:
        given.append((task.index, claim))
        await scene.work(task, claim)
        if task.index == 1:
            assert (claims.num_open, claims.open_tasks) == (2, [0, 1])

    claims = scene.claims(work=work, concurrency=2, let_go=scene.let_go)
    await scene.issue(3)
    await scene.drained(claims, at_s=5.0)
    assert line(scene.told) == (
        "0:work:0,0:work:1,1:let_go:1:True,1:done:1,1:work:2,2:keep:0,2:keep:2,2:let_go:2:True,2:done:2,3:let_go:0:True,3:done:0"
    )
    assert given == [(n, Claim(1, UNIX_S, UNIX_S + s)) for n, s in ((0, 0.0), (1, 0.0), (2, 1.0))]
    assert line(scene.asked).startswith("main:2:0.5:tasks,main:1:0.5:tasks,main:1:0.5:tasks,")
    assert ("main", 2, 0.5, TASKS) in scene.asked[3:]
    assert (await scene.left(), claims.num_done, claims.num_open) == (0, 3, 0)
    assert counted(claims) == (3, 0, 0) and counted(claims) == (0, 0, 0)


@virtual
async def test_a_lease_is_kept_three_times_an_ack_wait_whatever_the_bus_says(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    scene.seconds = {0: 19.0}

    async def away() -> None:
        if at() == 4.0:
            raise BusUnavailable("away")

    scene.answers["keep"] = away
    await scene.issue(1)
    await scene.drained(scene.claims(), at_s=25.0)
    assert [one[0] for one in scene.told if one[1] == "keep"] == [2.0 * n for n in range(1, 10)]
    assert caplog.messages == ["event=keep_failed source=main sequence=1 error=away"]


@virtual
async def test_what_an_engine_fails_is_given_back_with_growing_delays(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()

    async def work(task: RolloutTask, claim: Claim) -> None:
        scene.told.append((at(), "work", claim.deliveries))
        if claim.deliveries < 9:
            raise EngineError("gone")

    claims = scene.claims(work=work, let_go=scene.let_go)
    await scene.issue(1)
    await scene.drained(claims, at_s=200.0)
    delays = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [one[0] for one in scene.told if one[1] == "work"] == [sum(delays[:n]) for n in range(9)]
    assert [one[2:] for one in scene.told if one[1] == "retry"] == [(0, delay) for delay in delays]
    assert [one[3] for one in scene.told if one[1] == "let_go"] == [False] * 8 + [True]
    assert counted(claims) == (1, 8, 8) and claims.num_done == 1
    assert caplog.messages[0] == "event=task_given_back source=main task=0 delay_s=0.5 error=gone"


@virtual
async def test_any_other_error_ends_it() -> None:
    scene = Scene()

    async def work(task: RolloutTask, claim: Claim) -> None:
        raise ZeroDivisionError

    await scene.issue(1)
    with pytest.raises(ExceptionGroup) as caught:
        await scene.claims(work=work).run(scene.draining)
    assert caught.group_contains(ZeroDivisionError)
    assert await scene.left() == 1


@pytest.mark.parametrize(
    ("seconds", "grace", "told"),
    [
        (1.5, {}, "1.5:let_go:0:True,1.5:done:0"),
        (9.0, {}, "2:cut:0,2:let_go:0:False,2:retry:0:0"),
        (9.0, {"grace_s": 0.0}, "1:cut:0,1:let_go:0:False,1:retry:0:0"),
    ],
)
def test_a_drain_gives_back_what_is_not_done_in_time(
    seconds: float, grace: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    @virtual
    async def play() -> None:
        scene = Scene()
        scene.seconds = {0: seconds}
        await scene.issue(1)
        await scene.drained(scene.claims(let_go=scene.let_go, **grace), at_s=1.0)
        assert line([one for one in scene.told[1:] if one[1] != "keep"]) == told
        assert [lease.deliveries for lease in await scene.claim("main", max=1, wait_s=0.0)] == [2] * ("retry" in told)

    play()
    assert caplog.messages == [f"event=drained source=main given_back={int('retry' in told)}"]


@virtual
async def test_a_drain_waits_for_a_claim_that_is_on_its_way_and_then_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene()
    await scene.drained(scene.claims(concurrency=1), at_s=0.2)
    assert (at(), scene.told, scene.asked) == (0.5, [], [("main", 1, 0.5, TASKS)])


@virtual
async def test_a_bus_that_does_not_take_a_task_back_is_not_waited_for() -> None:
    scene = Scene()
    scene.seconds, scene.answers["retry"] = {0: 9.0}, lambda: elapse(60.0)
    await scene.issue(1)
    await scene.drained(scene.claims(), at_s=1.0)
    assert at() == 4.0, "the grace, and two seconds"

    async def away() -> None:
        raise BusUnavailable("away")

    scene.draining.clear()
    scene.answers["retry"] = away
    await elapse(10.0)
    await scene.drained(scene.claims(), at_s=1.0)
    assert scene.told[-1][1:] == ("retry", 0, 0.0) and at() == 16.0


@virtual
async def test_a_task_whose_records_are_stored_is_not_given_back() -> None:
    scene = Scene()
    scene.answers["done"] = lambda: elapse(60.0)
    await scene.issue(1)
    claims = scene.claims()
    await scene.drained(claims, at_s=2.0)
    assert scene.told[1:] == [(1.0, "done", 0), (2.0, "keep", 0)] and claims.num_done == 0


@virtual
async def test_work_on_tasks_that_have_ended_is_cut_short_a_second_after_the_grant(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene = Scene()
    scene.seconds = {n: 50.0 for n in range(9)}
    scene.answers["done"] = lambda: elapse(0.5)
    claims = scene.claims(let_go=scene.let_go, concurrency=3)
    await scene.issue(3)

    async def grants() -> None:
        await elapse(1.25)
        await scene.ends(1)
        await elapse(1.0)
        await scene.kv.delete(KEY_GRANTED)
        await scene.ends(b"no grant")
        await scene.kv.put(KEY_GRANTED, encode(Grant(9, 0, 0)))
        await elapse(1.0)
        await scene.ends(2)
        await elapse(1.0)
        await scene.ends(2)
        await scene.ends(0)

    granting = asyncio.create_task(grants())
    await scene.drained(claims, at_s=8.25)
    await granting
    assert line([one for one in scene.told[3:] if one[1] != "keep"]) == (
        "2.25:cut:0,2.25:let_go:0:True,2.25:done:0,4.25:cut:1,4.25:let_go:1:True,4.25:done:1,9.25:cut:2,9.25:let_go:2:False,9.25:retry:2:0"
    )
    assert caplog.messages[0] == "event=claim_dropped source=main task=0 reason=ended"
    assert caplog.messages[1].startswith("event=grant_unreadable error=") and KEY_GRANTED in caplog.messages[1]
    assert caplog.messages[2:] == ["event=claim_dropped source=main task=1 reason=ended", "event=drained source=main given_back=1"]
    assert await scene.left() == 1


@virtual
async def test_what_comes_of_tasks_that_have_ended_leaves_at_once() -> None:
    scene = Scene()
    claims = scene.claims(let_go=scene.let_go)
    claims.drop_below(2)
    claims.drop_below(1)
    await scene.issue(3)
    await scene.drained(claims, at_s=3.0)
    first = [one for one in scene.told if one[0] == 0.0]
    assert line(first) == "0:let_go:0:True,0:done:0,0:let_go:1:True,0:done:1,0:work:2"
    assert counted(claims) == (3, 0, 0)


@virtual
async def test_what_is_on_its_way_off_the_queue_is_not_cut_short() -> None:
    scene = Scene()
    scene.answers["done"] = lambda: elapse(2.0)
    claims = scene.claims()
    await scene.issue(1)
    asyncio.get_running_loop().call_later(1.5, claims.drop_below, 1)
    await scene.drained(claims, at_s=4.0)
    assert (await scene.left(), claims.num_done) == (0, 1)


@virtual
async def test_work_is_cut_short_once_and_a_drain_waits_for_it() -> None:
    scene, cleaned = Scene(), []

    async def work(task: RolloutTask, claim: Claim) -> None:
        try:
            await elapse(50.0)
        finally:
            await elapse(3.0)
            cleaned.append(at())

    claims = scene.claims(work=work)
    await scene.issue(1)
    for at_s in (1.0, 2.0):
        asyncio.get_running_loop().call_later(at_s, claims.drop_below, 1)
    await scene.drained(claims, at_s=2.5)
    assert cleaned == [4.0] and await scene.left() == 0


TIMES = {"claimed_s": UNIX_S + 1, "issued_s": UNIX_S, "deliveries": 1}
REFUSED = {"reason": "too_long", "detail": "line 9", "group_size": 3, "source": "other", **TIMES}


@pytest.mark.parametrize(
    ("body", "stone"),
    [
        (b"\xc1", {"reason": "poison"}),
        (encode(RolloutTask(run="r", index=5, source="main")), {"reason": "poison"}),
        (encode(RolloutTask(run="r", index=2, source="other", num_rollouts=3, refused=Refused("too_long", "line 9"))), REFUSED),
    ],
)
def test_a_task_that_cannot_be_worked_on_ends_with_a_tombstone(
    body: bytes, stone: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    @virtual
    async def play() -> None:
        scene = Scene()
        await scene.issue(2)
        await scene.publish(SUBJECTS.tasks("main"), body)
        await elapse(1.0)
        claims = scene.claims()
        await scene.drained(claims, at_s=2.0)
        [told] = await scene.stones()
        wanted = {"task": 2, "group_size": 1, "source": "main", "rollout": None, **stone}
        assert {name: getattr(told, name) for name in wanted} == wanted
        assert await scene.left() == 0 and counted(claims) == (3, 1, 0)
        if stone["reason"] == "poison":
            assert "task 2" in (told.detail or "")
            assert caplog.messages == [f"event=task_unreadable source=main task=2 error={told.detail}"]

    play()


class Requests:
    """Another queue."""

    stream = GRADING
    follows_ends = False

    def task(self, lease: Lease) -> int:
        return int(lease.body) if lease.body.isdigit() else 0

    async def read(self, lease: Lease) -> Any:
        return lease.body.decode() if lease.body.isdigit() else None


@virtual
async def test_another_queue_is_served_whatever_has_ended() -> None:
    scene, worked = Scene(), []

    async def work(item: str, claim: Claim) -> None:
        worked.append((item, claims.open_tasks))
        await elapse(3.0)

    claims = scene.claims(work=work, queue=Requests(), let_go=scene.let_go)
    for body in (b"7", b"3", b"?"):
        await scene.publish(SUBJECTS.grading("main"), body)
    await scene.ends(9)
    asyncio.get_running_loop().call_later(2.0, claims.drop_below, 9)
    await scene.drained(claims, at_s=5.0)
    assert worked == [("7", [0, 3, 7]), ("3", [0, 3, 7])] and counted(claims) == (3, 1, 0)
    assert {one[0] for one in scene.asked} == {"main"} and {one[3] for one in scene.asked} == {GRADING}
    assert [one[:1] + one[2:] for one in sorted(scene.told) if one[1] == "let_go"] == [(0.0, 0, True), (3.0, 3, True), (3.0, 7, True)]


class Wishes:
    """Somebody who has use for `number` tasks."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.number = scene, 0

    def wanted(self) -> int:
        return self.number

    def claimed(self, task: int) -> None:
        self.number -= 1
        self.scene.told.append((at(), "claimed", task))

    async def left(self, task: int, ended: bool) -> None:
        self.scene.told.append((at(), "left", task, ended, await self.scene.left()))

    def listen(self, changed: Callable[[], None], first_open: Callable[[], int]) -> None:
        self.changed, self.first_open = changed, first_open

    def wish(self, number: int) -> None:
        self.number = number
        self.changed()


@virtual
async def test_nothing_is_claimed_for_nobody() -> None:
    scene = Scene()
    wishes = Wishes(scene)
    claims = scene.claims(concurrency=2, demand=wishes, let_go=scene.let_go)
    assert wishes.first_open() == 0
    await scene.issue(4)
    asyncio.get_running_loop().call_later(1.25, wishes.wish, 1)
    asyncio.get_running_loop().call_later(3.25, wishes.wish, 3)
    asyncio.get_running_loop().call_later(4.0, claims.drop_below, 2)
    await scene.drained(claims, at_s=4.5)
    assert line([one for one in scene.told if one[1] != "keep"]) == (
        "1.25:claimed:0,1.25:work:0,2.25:let_go:0:True,2.25:done:0,2.25:left:0:True:3,3.25:claimed:1,3.25:claimed:2,3.25:work:1,"
        "3.25:work:2,4:cut:1,4:let_go:1:True,4:done:1,4:left:1:True:2,4:claimed:3,4:work:3,4.25:let_go:2:True,4.25:done:2,"
        "4.25:left:2:True:1,5:let_go:3:True,5:done:3,5:left:3:True:0"
    )
    assert [one[1] for one in scene.asked] == [1, 2, 1] and wishes.first_open() == 2


@virtual
async def test_a_drain_is_heard_while_nothing_is_wanted() -> None:
    scene = Scene()
    await scene.drained(scene.claims(demand=Wishes(scene)), at_s=1.0)
    assert (at(), scene.asked) == (1.0, [])
