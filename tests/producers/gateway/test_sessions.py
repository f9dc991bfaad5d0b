"""Sessions under a virtual clock, without HTTP and engines: who gets which session, when one ends, and what becomes of its task."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.errors import BusUnavailable, EngineError, SchemaError
from streamrl.producers.chat_format import opens_thought
from streamrl.producers.episode import Episode
from streamrl.producers.gateway.entries import TASK_PROMPT, Ended, Entry, Started, Tokens, Turn, packed_ids
from streamrl.producers.gateway.errors import ApiError
from streamrl.producers.gateway.journal import Journal
from streamrl.producers.gateway.keys import SessionKey
from streamrl.producers.gateway.placing import Place
from streamrl.producers.gateway.session import AGAIN_S, Ask, Bounds, Session
from streamrl.producers.gateway.sessions import Calls, Sessions
from streamrl.producers.protocol import Context, Failure
from streamrl.runtime.worker import AGENTS_WAIT
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.virtual import UNIX_S, at, elapse, virtual

IDLE_S, TOTAL_S = 10.0, 25.0


class Letters:
    """A tokenizer: a token a letter."""

    chat_template = ""
    stop_ids: tuple[int, ...] = (0,)
    control_texts: tuple[str, ...] = ()

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class Silent:
    """An engine that never answers: it breaks after some time."""

    seconds = 3600.0

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        await elapse(self.seconds)
        raise ZeroDivisionError
        yield None

    async def abort(self, request_id: str) -> None:
        pass

    async def info(self) -> Any:
        return None


def turn(number: int, seed: int = 0) -> Turn:
    tokens = Tokens(packed_ids([number]), b"\0" * 8, (VersionSpan(1, Version(0, 1)),), LogprobMode.SAMPLED, "stop", "e")
    request = b"%d" % number
    return Turn(parent=TASK_PROMPT, said=request, tokens=tokens, sampling=Sampling(), seed=seed, request=request, made_s=5.0)


STARTED = Started(nonce="n", started_s=3.0, request="once")


NOBODY = f"{AGENTS_WAIT}: none has a session open"
REFUSED = "; the newest call was refused: "


def quiet(sessions: int, seconds: int) -> str:
    """Return what a gateway says whose agents have stopped."""
    return f"{AGENTS_WAIT}: {sessions} sessions are open, no call was answered for {seconds} s"


class Scene:
    """A gateway's sessions, and the tasks that are claimed for it."""

    def __init__(self, num_rollouts: int = 2, **options: Any) -> None:
        self.bus = MemoryBus("r")
        self.num_rollouts = num_rollouts
        self.changes = 0
        self.engine = Silent()
        self.first_open = 0
        self.journal = Journal(self.bus.turns)
        bounds = Bounds(max_turns=9, max_calls=9, call_s=3600.0, max_bytes=1 << 20)
        given: dict[str, Any] = {"idle_s": IDLE_S, "total_s": TOTAL_S, "own_prompts": True, "drawable": lambda sampling: None}
        self.sessions = Sessions(self.journal, bounds, num_rollouts=num_rollouts, **given | options)
        self.sessions.listen(self.changed, lambda: self.first_open)

    def changed(self) -> None:
        self.changes += 1

    def task(self, index: int, **fields: Any) -> RolloutTask:
        return RolloutTask(
            **{
                "run": "r",
                "index": index,
                "source": "main",
                "prompt": "ab",
                "prompt_ids": (97, 98),
                "num_rollouts": self.num_rollouts,
                **fields,
            }
        )

    def give(self, index: int, **fields: Any) -> asyncio.Task[Any]:
        """A claimed task, worked on."""
        task = self.task(index, **fields)
        context = Context(
            engine=self.engine,  # type: ignore[arg-type]
            tokenizer=Letters(),  # type: ignore[arg-type]
            task=task,
            seed=0,
            log=logging.getLogger("test"),
            chat_template=False,
            max_len=100,
        )
        self.sessions.claimed(index)
        return asyncio.create_task(self.sessions.rollout(task, context))

    async def stored(self, task: int, *entries: Sequence[Entry]) -> None:
        """The journal has these entries of the task's rollouts."""
        for rollout, some in enumerate(entries):
            for number, entry in enumerate(some):
                await self.journal.append(task, rollout, number, entry)

    def call(self, session: Session) -> asyncio.Task[Any]:
        """A call that no engine answers."""

        def place(tree: Any) -> Place:
            return Place(TASK_PROMPT, (97, 98), (), ())

        return asyncio.create_task(session.call(Ask(place=place, fields={}, request=b"x")))

    def metrics(self) -> list[float]:
        return [self.sessions.take_metrics()[f"gateway/{name}"] for name in ("open_sessions", "waiting_agents")]


async def soon() -> None:
    """Let everything go on that can."""
    await elapse(0.001)


async def refused(coroutine: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await coroutine
    return caught.value


def key(session: Session, **fields: Any) -> SessionKey:
    assert session.started is not None
    return SessionKey(session.context.task.index, session.context.rollout_index, fields.get("nonce", session.started.nonce))


@virtual
async def test_a_thought_that_the_prompt_of_a_session_opens_is_known_by_its_episode() -> None:
    opened = tuple(map(ord, "2+3?<think>"))
    again = Turn(
        parent=0,
        said=b"2",
        heard=(b"go on",),
        context=packed_ids([ord("?")]),
        tokens=turn(54).tokens,
        sampling=Sampling(),
        seed=1,
        request=b"2",
        made_s=6.0,
    )
    scene = Scene()
    await scene.stored(4, [STARTED, turn(53), Ended()], [STARTED, turn(53), again, Ended()])
    one, two = await scene.give(4, prompt_ids=opened)
    assert [opens_thought(Letters(), episode.asked_ids) for episode in (one, two)] == [True, False]  # type: ignore[arg-type]


@virtual
async def test_rollouts_are_given_out_in_order_and_become_the_tasks_outcome() -> None:
    scene = Scene()
    work = scene.give(4)
    await soon()
    one, two = await scene.sessions.start(1.0), await scene.sessions.start(1.0, "twice")
    assert [(s.name, s.started and s.started.started_s) for s in (one, two)] == [("4.0", UNIX_S + 0.001), ("4.1", UNIX_S + 0.001)]
    assert one.started is not None and two.started is not None
    assert len(one.started.nonce) == 16 != len(two.started.request) and (one.started.request, two.started.request) == ("", "twice")
    assert await scene.sessions.start(1.0, "twice") is two
    assert (scene.sessions.num_open, scene.sessions.num_waiting) == (2, 0)
    assert one.rules.own_prompts is True and one.rules.task.index == 4
    assert await refused(scene.sessions.start(0.0, "thrice")) and await scene.sessions.find(key(one), 0.0) is one
    await one.end(Ended(reason="failed", detail="why"))
    await soon()
    assert not work.done() and scene.sessions.num_open == 1
    await two.end(Ended())
    assert await work == [Failure(0, "failed", "why"), Failure(1, "failed", "the session ended without an answered call")]
    assert scene.sessions.take_metrics() == {
        "gateway/open_sessions": 0,
        "gateway/waiting_agents": 0,
        "gateway/started_total": 2,
        "gateway/timeouts_total": 0,
        "gateway/abandoned_total": 0,
        "gateway/calls_total": 0,
        "gateway/refused_total": 0,
    }
    assert scene.sessions.take_metrics()["gateway/started_total"] == 0
    assert [scene.sessions.has_ended(SessionKey(4, n, "")) for n in range(3)] == [False, True, False]
    assert not scene.sessions.has_ended(SessionKey(5, 0, ""))
    assert scene.sessions.at_hand(key(one)) is None
    assert (await refused(scene.sessions.find(key(one), 9.0))).status == 410 and at() < 1.0
    closed = await refused(one.start(STARTED))
    assert (closed.status, closed.code, closed.retry_after_s) != (0, "", 0)


@virtual
async def test_a_task_that_comes_again_goes_on_from_its_journal() -> None:
    scene = Scene(num_rollouts=3)
    await scene.stored(4, [STARTED, turn(1), turn(2, 1)], [], [STARTED, turn(1), Ended()])
    work = scene.give(4)
    await soon()
    one, two, three = [scene.sessions.at_hand(SessionKey(4, 0, "n")), await scene.sessions.start(0.0), None]
    assert one is not None and two is not None and two.name == "4.1" and scene.sessions.num_open == 2
    assert await scene.sessions.start(1.0, "once") is one
    for wrong in (SessionKey(4, 0, "m"), SessionKey(4, 3, "n"), SessionKey(4, 1, "n"), SessionKey(4, 9, "n")):
        with pytest.raises(ApiError) as caught:
            scene.sessions.at_hand(wrong)
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    await one.end(Ended())
    await two.end(Ended(reason="failed"))
    first, second, third = await work
    assert isinstance(first, Episode) and isinstance(third, Episode) and second == Failure(1, "failed", "")
    assert scene.sessions.take_metrics()["gateway/abandoned_total"] == 1
    assert [scene.sessions.has_ended(SessionKey(4, n, "")) for n in range(3)] == [True, False, True] and three is None
    await scene.bus.turns.remove("4/0/")
    scene.give(4)
    await soon()
    assert not scene.sessions.has_ended(SessionKey(4, 2, "")), "its task is here again"


@virtual
async def test_a_free_session_has_no_key() -> None:
    scene = Scene()
    scene.give(4)
    await soon()
    with pytest.raises(ApiError) as caught:
        scene.sessions.at_hand(SessionKey(4, 0, "n"))
    assert caught.value.status == 401


@virtual
async def test_agents_that_do_not_come_are_what_it_waits_for_and_why_they_are_refused() -> None:
    scene = Scene()
    assert scene.sessions.doing() == NOBODY
    scene.sessions.calls.refused("401 expected\n a key")
    assert scene.sessions.doing() == f"{NOBODY}{REFUSED}401 expected a key"
    waiting = asyncio.create_task(scene.sessions.start(5.0))
    await soon()
    assert not scene.sessions.doing().startswith(AGENTS_WAIT), "an agent waits for a task"
    scene.give(4)
    await soon()
    session = waiting.result()
    scene.sessions.calls.answered()
    assert scene.sessions.doing().startswith("serves sessions: 1 open")
    await elapse(9.9)
    assert scene.sessions.doing().startswith("serves sessions: 1 open")
    await elapse(0.1)
    assert scene.sessions.doing() == quiet(1, 10)
    scene.sessions.calls.refused("no")
    assert scene.sessions.doing() == f"{quiet(1, 0)}{REFUSED}no"
    asked = scene.call(session)
    await soon()
    assert scene.sessions.doing().startswith("serves sessions: 1 open"), "an engine is asked"
    asked.cancel()


@virtual
async def test_agents_wait_in_their_order_and_are_counted_as_wanted_tasks() -> None:
    scene = Scene()
    waiting = [asyncio.create_task(scene.sessions.start(5.0)) for _ in range(3)]
    await soon()
    assert (scene.sessions.num_waiting, scene.sessions.wanted(), scene.changes) == (3, 2, 3)
    assert scene.sessions.doing().startswith("serves sessions: 0 open, 3 agents wait, 0.0 calls/s")
    scene.sessions.claimed(4)
    assert scene.sessions.wanted() == 1
    work = scene.give(4)
    await soon()
    assert [one.result().name for one in waiting if one.done()] == ["4.0", "4.1"] and not waiting[2].done()
    assert (scene.sessions.num_waiting, scene.sessions.wanted(), scene.changes) == (1, 1, 4)
    scene.give(5)
    await soon()
    assert waiting[2].result().name == "5.0" and scene.changes == 4
    assert (scene.sessions.wanted(), scene.metrics()) == (0, [3, 0])
    late = asyncio.create_task(refused(scene.sessions.start(2.0)))
    assert (await scene.sessions.start(2.0)).name == "5.1"
    scene.give(6)
    error = await late if late.done() else None
    assert error is None and not work.done()
    late.cancel()


@virtual
async def test_who_waits_in_vain_is_told_so_and_leaves_the_queue() -> None:
    scene = Scene()
    error = await refused(scene.sessions.start(2.0))
    assert (error.status, error.code, error.retry_after_s, at(), scene.sessions.num_waiting) == (429, "no_task", AGAIN_S, 2.0, 0)
    gone = asyncio.create_task(scene.sessions.start(2.0))
    await soon()
    gone.cancel()
    await soon()
    assert gone.cancelled() and scene.sessions.num_waiting == 0 and scene.sessions.wanted() == 0
    waits = asyncio.create_task(refused(scene.sessions.start(9.0)))
    await soon()
    scene.sessions.close()
    assert (await waits).code == "no_task" and at() == pytest.approx(2.002, abs=0.01)
    assert (await refused(scene.sessions.start(9.0))).code == "no_task" and at() == pytest.approx(2.002, abs=0.01)
    assert (await refused(scene.sessions.find(SessionKey(8, 0, "n"), 9.0))).code == "session_away" and at() < 2.02


@virtual
async def test_a_session_for_an_agent_that_has_gone_goes_to_the_next() -> None:
    scene = Scene(num_rollouts=1)
    first, second = asyncio.create_task(scene.sessions.start(5.0)), asyncio.create_task(scene.sessions.start(5.0))
    await soon()
    granting = scene.give(4)
    while scene.sessions.num_waiting == 2:
        await asyncio.sleep(0.0)
    first.cancel()
    await soon()
    assert first.cancelled() and second.result().name == "4.0" and not granting.done()
    assert scene.sessions.take_metrics()["gateway/started_total"] == 1


@virtual
async def test_a_session_that_is_on_its_way_to_an_agent_is_not_given_to_another() -> None:
    scene = Scene(num_rollouts=1)
    first = asyncio.create_task(scene.sessions.start(5.0))
    await soon()
    scene.give(4)
    while scene.sessions.num_waiting:
        await asyncio.sleep(0.0)
    assert not first.done() and (await refused(scene.sessions.start(0.0))).status == 429
    assert (await first).name == "4.0"


@virtual
async def test_a_start_that_is_not_stored_leaves_the_session_free() -> None:
    scene = Scene(num_rollouts=1)
    scene.give(4)
    await soon()
    put = scene.bus.turns.put

    async def away(*_: Any, **__: Any) -> int:
        await elapse(1.0)
        raise BusUnavailable("it is away")

    scene.bus.turns.put = away  # type: ignore[method-assign]
    first = asyncio.create_task(refused(scene.sessions.start(1.0)))
    await elapse(0.5)
    second = asyncio.create_task(scene.sessions.start(5.0))
    await soon()
    assert scene.sessions.num_waiting == 1, "it is reserved"
    scene.bus.turns.put = put  # type: ignore[method-assign]
    assert (await first).code == "bus_unavailable"
    assert (await second).name == "4.0" and scene.sessions.take_metrics()["gateway/started_total"] == 1


@virtual
async def test_a_lost_task_is_wanted_for_ten_seconds_after_the_last_call() -> None:
    scene = Scene()
    finding = asyncio.create_task(refused(scene.sessions.find(SessionKey(7, 0, "n"), 2.5)))
    await soon()
    assert (scene.sessions.wanted(), scene.changes) == (1, 1)
    scene.sessions.claimed(7)
    assert scene.sessions.wanted() == 0
    await scene.sessions.left(7, False)
    assert (scene.sessions.wanted(), scene.changes) == (1, 2)
    error = await finding
    assert (error.status, error.code, error.retry_after_s, at(), scene.changes) == (503, "session_away", AGAIN_S, 2.5, 4)
    await elapse(9.4)
    assert scene.sessions.wanted() == 1, "asked for at 2 s the last time"
    await elapse(0.1)
    assert scene.sessions.wanted() == 0


@virtual
async def test_what_comes_instead_of_a_lost_task_is_not_added_to_it() -> None:
    scene = Scene()
    finding = asyncio.create_task(scene.sessions.find(SessionKey(7, 0, "n"), 60.0))
    other = asyncio.create_task(refused(scene.sessions.find(SessionKey(8, 0, "n"), 60.0)))
    await soon()
    assert scene.sessions.wanted() == 2
    looking = asyncio.create_task(scene.sessions.look())
    instead = scene.give(3)
    await soon()
    assert scene.sessions.wanted() == 1
    with pytest.raises(EngineError, match="task 3"):
        await instead
    assert at() == pytest.approx(2.25, abs=0.01), "two seconds, at the next look"
    await scene.stored(7, [STARTED], [])
    scene.give(7)
    assert (await finding).name == "7.0" and scene.sessions.wanted() == 1
    assert at() == pytest.approx(2.25, abs=0.01), "as soon as it is here"
    await scene.sessions.left(8, True)
    assert (await other).status == 410
    looking.cancel()


@virtual
async def test_what_has_ended_is_told_from_what_is_away() -> None:
    scene = Scene()
    scene.first_open = 3
    assert (await refused(scene.sessions.find(SessionKey(2, 0, "n"), 0.0))).status == 410
    assert (await refused(scene.sessions.find(SessionKey(3, 0, "n"), 0.0))).status == 503
    await scene.stored(3, [STARTED])
    await scene.sessions.left(3, False)
    assert await scene.bus.turns.keys() == ["3/0/0"]
    await scene.sessions.left(3, True)
    assert await scene.bus.turns.keys() == [] and scene.changes == 2
    assert (await refused(scene.sessions.find(SessionKey(3, 0, "n"), 0.0))).status == 410
    with pytest.raises(EngineError, match="task 3"):
        await scene.give(3)
    await scene.stored(3, [STARTED])
    again = scene.give(3)
    await soon()
    assert not again.done(), "what its journal tells of has not ended"
    assert not scene.sessions.has_ended(SessionKey(3, 0, "n"))


@virtual
async def test_so_many_ended_tasks_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.producers.gateway.sessions._ENDED_KEPT", 2)
    scene = Scene()
    for task in (1, 2, 3):
        await scene.sessions.left(task, True)
    assert [(await refused(scene.sessions.find(SessionKey(task, 0, "n"), 0.0))).status for task in (1, 2, 3)] == [503, 410, 410]


@virtual
async def test_a_second_delivery_waits_until_the_first_is_over() -> None:
    scene = Scene()
    first = scene.give(4)
    await soon()
    session = await scene.sessions.start(0.0)
    second = scene.give(4)
    await soon()
    assert not second.done() and scene.sessions.wanted() == 0
    first.cancel()
    await soon()
    assert scene.sessions.at_hand(key(session)) is not session, "the journal's"
    closed = await refused(session.start(STARTED))
    assert (closed.code, closed.retry_after_s) == ("session_moved", AGAIN_S) and "no longer at this gateway" in closed.message
    assert "?" not in closed.message


@pytest.mark.parametrize("moved", [0, 1])
@virtual
async def test_a_session_that_goes_on_elsewhere_takes_its_task_along(moved: int) -> None:
    scene = Scene()
    work = scene.give(4)
    await soon()
    sessions = [await scene.sessions.start(0.0) for _ in range(2)]
    await scene.bus.turns.put(f"4/{moved}/1", b"another gateway's")
    await refused(sessions[moved].end(Ended()))
    with pytest.raises(EngineError, match="task 4"):
        await work
    assert not scene.sessions.has_ended(SessionKey(4, 0, "")) and scene.sessions.at_hand(key(sessions[0])) is None


@pytest.mark.parametrize(("fields", "kind"), [({"prompt": [{"role": "nobody"}]}, SchemaError), ({}, EngineError)])
@virtual
async def test_a_task_that_cannot_be_served(fields: dict[str, Any], kind: type[Exception]) -> None:
    scene = Scene()

    async def away(prefix: str) -> Any:
        raise BusUnavailable("it is away")

    if not fields:
        scene.bus.turns.values = away  # type: ignore[method-assign]
    with pytest.raises(kind):
        await scene.give(4, **fields)


@virtual
async def test_agents_that_are_silent_for_too_long_lose_their_sessions(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(num_rollouts=3)
    looking = asyncio.create_task(scene.sessions.look())
    work = scene.give(4)
    await elapse(4.0)
    idle, calling = [await scene.sessions.start(0.0) for _ in range(2)]
    call = scene.call(calling)
    await elapse(10.2)
    assert idle.ended is None
    await elapse(0.3)
    assert idle.ended == Ended(reason="timeout", detail="no call for 10 s (gateway.idle_timeout_s, producer.rollout_timeout_s)")
    assert calling.ended is None and scene.sessions.take_metrics()["gateway/timeouts_total"] == 1
    await elapse(30.0)
    assert calling.ended is None, "its call is open"
    assert scene.sessions.take_metrics()["gateway/timeouts_total"] == 0, "once"
    await calling.end(Ended())
    await elapse(9.5)
    assert not work.done(), "while one was open, others might have come"
    await elapse(1.0)
    first, second, third = work.result()
    assert third == Failure(2, "timeout", "nobody has started a session for it")
    assert (first.reason, second.reason, call.done()) == ("timeout", "failed", True)
    looking.cancel()


@virtual
async def test_all_that_an_agent_has_is_limited_too(caplog: pytest.LogCaptureFixture) -> None:
    scene = Scene(num_rollouts=1)
    looking = asyncio.create_task(scene.sessions.look())
    scene.engine.seconds = 1.0
    scene.give(4)
    await soon()
    session = await scene.sessions.start(0.0)
    for _ in range(3):
        await elapse(8.0)
        with pytest.raises(ZeroDivisionError):
            await scene.call(session)
    assert session.ended is None and session.agent_s == pytest.approx(24.0, abs=0.01)
    await elapse(0.9)
    assert session.ended is None
    put, scene.bus.turns.put = scene.bus.turns.put, None  # type: ignore[method-assign,assignment]

    async def away(*_: Any, **__: Any) -> int:
        raise BusUnavailable("it is away")

    scene.bus.turns.put = away  # type: ignore[method-assign]
    await elapse(0.5)
    assert caplog.messages == ["event=session_not_ended session=4.0 error=the run's bus is away: it is away"]
    scene.bus.turns.put = put  # type: ignore[method-assign]
    await elapse(0.3)
    assert session.ended is not None and session.ended.reason == "timeout"
    assert scene.sessions.take_metrics()["gateway/timeouts_total"] == 1
    looking.cancel()


@virtual
async def test_a_task_that_nobody_asks_for_is_given_back() -> None:
    scene = Scene()
    looking = asyncio.create_task(scene.sessions.look())
    work = scene.give(4)
    with pytest.raises(EngineError, match="task 4"):
        await work
    assert at() == 10.25 and not scene.sessions.has_ended(SessionKey(4, 0, ""))
    looking.cancel()


@virtual
async def test_now_and_then_what_others_have_left_is_swept() -> None:
    scene = Scene()
    swept: list[tuple[float, int]] = []

    async def sweep(first_open: int) -> None:
        swept.append((at(), first_open))

    scene.journal.sweep = sweep  # type: ignore[method-assign]
    scene.first_open = 5
    looking = asyncio.create_task(scene.sessions.look())
    await elapse(125.0)
    assert swept == [(60.0, 5), (120.0, 5)]
    looking.cancel()
    unheard = Sessions(scene.journal, None, idle_s=1, total_s=1, own_prompts=True, drawable=print, num_rollouts=1)  # type: ignore[arg-type]
    assert (await refused(unheard.find(SessionKey(0, 0, "n"), 0.0))).status == 503


@virtual
async def test_calls_are_counted_and_how_many_a_second() -> None:
    calls = Calls()
    assert (calls.num_answered, calls.num_refused, calls.per_s) == (0, 0, 0.0)

    def hear(answered: int, refused: int) -> None:
        for _ in range(answered):
            calls.answered()
        for _ in range(refused):
            calls.refused("why " * 100)

    hear(6, 2)
    assert len(calls.newest_refusal) == 300
    await elapse(0.5)
    assert (calls.take(), calls.per_s) == ((6, 2), 12.0)
    hear(4, 1)
    await elapse(2.0)
    assert (calls.take(), calls.per_s) == ((4, 1), 2.0)
    hear(2, 0)
    assert (calls.take(), calls.per_s, calls.newest_refusal) == ((2, 0), 2000.0, "")
