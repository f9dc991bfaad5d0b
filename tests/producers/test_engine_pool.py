from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import BusConfig
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import EngineError, EngineSilent
from streamrl.producers.completions import Completion, complete
from streamrl.producers.engine_pool import EnginePool, Silence
from streamrl.runtime.worker import ENGINES_FAIL, ENGINES_LEFT_OUT
from streamrl.schemas.codec import encode
from streamrl.schemas.control import EnginePresence
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.policies import make_model, script, start_engine
from tests.support.virtual import elapse, virtual


class Fleet:
    """Table engines in process, announced by hand."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.bus = MemoryBus("run", BusConfig())
        self.tokenizer = tokenizer
        self.directory = directory
        self.engines: dict[str, TableEngine] = {}
        self.pool = EnginePool(self.bus.kv, lambda presence: self.engines[presence.address])
        self._next = 0

    async def announce(self, name: str, **facts: object) -> None:
        presence = {"policy": "policy", "serving": Version(0, 0), "slots": 8, **facts}
        await self.bus.kv.put(f"presence/engines/{name}", encode(EnginePresence(engine=name, address=name, **presence)))  # type: ignore[arg-type]

    async def add(self, name: str, *, mean_s: float = 0.0, **facts: object) -> None:
        delay = TokenDelay(mean_s=mean_s, sigma=0.0)
        self.engines[name] = await start_engine(self.directory, script(self.tokenizer, {}), engine_id=name, delay=delay)
        await self.announce(name, **facts)
        await self.until(lambda: name in self.pool.engines)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.01)

    def request(self, *, session: str = "", count: int = 1, min_version: int = 0) -> GenerateRequest:
        self._next += 1
        return GenerateRequest(
            request_id=str(self._next),
            prompt_ids=self.tokenizer.encode("3+4="),
            sampling=Sampling(max_new_tokens=4),
            seeds=tuple(range(count)),
            session=session,
            min_version=min_version,
        )

    async def ask(self, **facts: object) -> str:
        """Which engine answered."""
        [completion, *_] = await complete(self.pool, self.request(**facts))  # type: ignore[arg-type]
        return completion.engine

    def begin(self, **facts: object) -> asyncio.Task[list[Completion]]:
        return asyncio.create_task(complete(self.pool, self.request(**facts)))  # type: ignore[arg-type]


def said(begins: str, engine: str, count: int, why: str) -> str:
    """Return the words about an engine that has failed so many requests in a row."""
    return f"{begins}: {engine}, {count} requests in a row, the newest: {why}"


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(directory, make_model(directory))
    follower = asyncio.create_task(fleet.pool.run())
    try:
        yield fleet
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        for engine in fleet.engines.values():
            await engine.stop()
        await fleet.bus.close()


async def test_the_least_loaded_engine_is_asked(tmp_path: Path) -> None:
    async with running(tmp_path / "model") as fleet:
        waiting = fleet.begin()
        await asyncio.sleep(0.05)
        assert not waiting.done(), "there is none yet"
        await fleet.add("a", mean_s=0.3)
        assert (await waiting)[0].engine == "a"
        await fleet.add("b", mean_s=0.3)
        first = fleet.begin(count=4)
        await asyncio.sleep(0.05)
        second = fleet.begin(count=2)
        await asyncio.sleep(0.05)
        third = fleet.begin()
        assert [(await task)[0].engine for task in (first, second, third)] == ["a", "b", "b"]
        # Nothing of ours runs now; what others have there is counted too.
        await fleet.announce("a", running=2)
        await fleet.announce("b", running=8)
        await fleet.until(lambda: fleet.pool.engines["b"].running == 8)
        assert await fleet.ask() == "a"
        with pytest.raises(EngineError, match="token ids"):
            await complete(fleet.pool, GenerateRequest(request_id="bad", prompt_ids=(10_000,), seeds=(0,)))
        assert await fleet.ask() == "a", "a refused request says nothing against the engine"
        await fleet.announce("c", policy="critic")
        await fleet.bus.kv.put("presence/engines/d", b"of another version")
        assert await fleet.ask() == "a" and list(fleet.pool.engines) == ["a", "b"]


async def test_an_engine_that_serves_the_version_already_or_has_room_is_preferred(tmp_path: Path) -> None:
    async with running(tmp_path / "model") as fleet:
        await fleet.add("short", max_len=4)
        empty = await complete(fleet.pool, fleet.request(count=2, session="x"))  # a prompt of four tokens
        assert [(c.engine, c.token_ids, c.finish_reason) for c in empty] == [("short", (), "length")] * 2
        await fleet.add("long", running=8, max_len=5)
        assert [await fleet.ask(), await fleet.ask(session="x")] == ["long", "long"]
        await fleet.add("newer", running=16, serving=Version(0, 3))
        begun = fleet.begin(min_version=3)
        await asyncio.sleep(0.05)
        assert [(await fleet.engines[name].info()).waiting for name in ("short", "long", "newer")] == [0, 0, 1]
        begun.cancel()


async def test_a_session_stays_with_its_engine_while_it_lives(tmp_path: Path) -> None:
    async with running(tmp_path / "model") as fleet:
        await fleet.add("a")
        await fleet.add("b")
        home = await fleet.ask(session="x")
        other = "b" if home == "a" else "a"
        await fleet.announce(home, running=100)
        await fleet.until(lambda: fleet.pool.engines[home].running == 100)
        assert [await fleet.ask(session="x"), await fleet.ask()] == [home, other]
        await fleet.bus.kv.delete(f"presence/engines/{home}")
        await fleet.until(lambda: home not in fleet.pool.engines)
        assert await fleet.ask(session="x") == other


async def test_engines_of_which_each_fails_whatever_it_is_asked_are_what_requests_wait_for(tmp_path: Path) -> None:
    """With the reason that an engine gives, from the first failure on until one answers."""
    async with running(tmp_path / "model") as fleet:
        await fleet.add("a")
        broken = fleet.engines["a"].generate

        def fails(request: GenerateRequest) -> AsyncIterator[Chunk]:
            raise EngineError("status 500:\n out of memory")

        fleet.engines["a"].generate = fails  # type: ignore[method-assign]
        assert fleet.pool.wait == ""
        for count in (1, 2):
            with pytest.raises(EngineError):
                await fleet.ask()
            assert fleet.pool.wait == said(ENGINES_FAIL, "a", count, "status 500: out of memory")
            await fleet.announce("a", serving=Version(0, count))  # which says nothing of the next request
        await fleet.add("b", running=4)
        assert fleet.pool.wait == "", "one has not failed"
        fleet.engines["a"].generate = broken  # type: ignore[method-assign]
        await fleet.ask()
        await fleet.announce("b", running=0)
        assert fleet.pool.wait == ""


async def test_prompts_that_no_engine_has_room_for_are_said_after_some(tmp_path: Path) -> None:
    async with running(tmp_path / "model") as fleet:
        await fleet.add("short", max_len=4)
        for count in range(1, 5):
            await complete(fleet.pool, fleet.request())
            said = f"{ENGINES_FAIL}: none has room for {count} prompts in a row, the newest of 4 tokens"
            assert fleet.pool.wait == (said if count >= 3 else "")
        await fleet.announce("short", max_len=5)
        await fleet.until(lambda: fleet.pool.engines["short"].max_len == 5)
        await fleet.ask()
        assert fleet.pool.wait == ""


async def test_an_engine_that_fails_at_once_does_not_get_every_request_for_its_load(tmp_path: Path) -> None:
    async with running(tmp_path / "model") as fleet:
        await fleet.add("a")
        await fleet.add("b", running=4)

        def fails(request: GenerateRequest) -> AsyncIterator[Chunk]:
            raise EngineError("status 500")

        fleet.engines["a"].generate = fails  # type: ignore[method-assign]
        found: list[str] = []
        for _ in range(20):
            try:
                found.append(await fleet.ask())
            except EngineError:
                found.append("failed")
        assert found[:3] == ["failed"] * 3 and found.count("b") >= 15
        assert fleet.pool.wait == said(ENGINES_LEFT_OUT, "a", found.count("failed"), "status 500")


async def test_an_engine_that_cannot_be_reached_is_left_out_until_it_is_announced_again(tmp_path: Path) -> None:
    async with running(tmp_path / "model") as fleet:
        await fleet.add("b", running=4)
        fleet.engines["a"] = ChannelEngine("http://127.0.0.1:9")  # type: ignore[assignment]  # nobody listens on the discard port
        await fleet.announce("a")
        await fleet.until(lambda: "a" in fleet.pool.engines)
        try:
            with pytest.raises(EngineError, match="has gone"):
                await fleet.ask()
            assert await fleet.ask() == "b"
            await fleet.announce("a")
            await asyncio.sleep(0.05)
            with pytest.raises(EngineError, match="has gone"):
                await fleet.ask()
        finally:
            await fleet.engines.pop("a").close()  # type: ignore[attr-defined]


PRESENCE = EnginePresence(engine="engine-0", address="a", serving=Version(0, 3), running=4, slots=8, tokens_total=1000)


@virtual
@pytest.mark.parametrize(
    ("per_s", "facts", "asked", "after_s"),
    [
        # Each of 4 others is given 25 tokens a second: the 1000 that this one may have are 40 s, but 120 s are waited.
        (100, {}, {}, 121),
        # Here they are 400 s, and it may be as slow as half of the others.
        (10, {}, {}, 801),
        (0, {"running": 0}, {}, 121),
        (0, {}, {}, None),  # all of the engine stands: that is not this call's
        (100, {"waiting": 3}, {}, None),  # it may be one of those
        (100, {}, {"min_version": 4}, None),
        (100, {"serving": None}, {}, None),
    ],
)
async def test_a_call_that_is_never_answered_is_told_from_one_that_waits(
    per_s: int, facts: dict[str, Any], asked: dict[str, Any], after_s: int | None
) -> None:
    request = GenerateRequest(request_id="1", prompt_ids=(1,), sampling=Sampling(max_new_tokens=1000), seeds=(0,), **asked)
    call, now = Silence(request, 120.0), msgspec.structs.replace(PRESENCE, **facts)
    waits = call.until()
    given_up: list[int] = []

    async def wait() -> None:
        with contextlib.suppress(TimeoutError):
            async with waits:
                await asyncio.Event().wait()
        given_up.append(second)

    waiting = asyncio.create_task(wait())
    for second in range(1, 3600):  # noqa: B007
        before, now = now, msgspec.structs.replace(now, tokens_total=now.tokens_total + per_s)
        call.look(before, now, 1.0)
        await elapse(0.1)
        if given_up:
            break
    assert given_up == ([] if after_s is None else [after_s])
    waiting.cancel()


def test_a_call_that_is_answered_now_and_then_goes_on_but_not_beyond_what_it_asked_for() -> None:
    call = Silence(GenerateRequest(request_id="1", prompt_ids=(1,), sampling=Sampling(max_new_tokens=50), seeds=(0, 1)), 120.0)
    chunk = Chunk(completion=0, token_ids=(7,), logprobs=(-0.5,), spans=())
    for _ in range(50):
        for _ in range(119):
            call.look(PRESENCE, msgspec.structs.replace(PRESENCE, tokens_total=9000), 1.0)
        call.heard(chunk)
    assert not call.why
    call.heard(msgspec.structs.replace(chunk, completion=1))
    with pytest.raises(EngineSilent):
        call.heard(chunk)


async def test_a_call_that_is_given_up_ends_its_request(tmp_path: Path) -> None:
    async with running(tmp_path) as fleet, asyncio.timeout(60):
        fleet.pool = EnginePool(fleet.bus.kv, lambda presence: fleet.engines[presence.address], silent_s=0.05)
        follower = asyncio.create_task(fleet.pool.run())
        await fleet.add("slow", mean_s=600.0)
        asking = fleet.begin()
        while not (await asyncio.wait([asking], timeout=0.02))[0]:
            await fleet.announce("slow")  # which has no request, as it says
        with pytest.raises(EngineSilent):
            await asking
        follower.cancel()
