"""The producer worker of a taskset: it keeps a guest running, and hands the sessions of one that died to the next.

Leases, records and time limits are the gateway's; a guest is an agent like any other. A session that two guests have died of ends as
`failed`, with how the second one ended. Those that are open when the worker drains are played on when it starts again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import aiohttp
import msgspec

from streamrl.bridges.verifiers.guests import LAST_WORDS_S, Guest, Said, Spec, guest, wrong
from streamrl.config.bridges import split
from streamrl.errors import LaunchError
from streamrl.producers.gateway.worker import POLICY, addresses
from streamrl.runtime.retries import pause_s
from streamrl.runtime.service import describe_exit
from streamrl.system import write_private

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_LOOK_S = 0.2
_LOADING_S = 300.0
_WELL_S = 60.0
"""A guest that has run for this long is well: its next failure is the first in a row."""
_MOST_FAILURES = 5
"""In a row; then the worker ends, which its supervisor counts."""
_END_S = 10.0


class Left:
    """A session that a guest has begun."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        """As the gateway has given it."""
        self.deaths = 0
        """Of guests that played it."""
        self.plays = False
        """Whether the guest that runs does."""

    @property
    def root(self) -> str:
        """Its URL, without `/v1`."""
        return self.told["base_url"].removesuffix("/v1")


class Sessions:
    """Those that guests of this worker have open, and how many have ended."""

    def __init__(self, told: Sequence[dict[str, Any]]) -> None:
        self.open = {one["session_id"]: Left(one) for one in told}
        self.num_ended = 0
        self.num_lines = 0
        """Of the guest that runs."""
        self.heard_s = 0.0
        """When it said the last one."""
        self.plays = False
        """Whether it has begun a session."""

    def begin(self) -> None:
        """A guest starts."""
        self.num_lines, self.heard_s, self.plays = 0, time.monotonic(), False
        for left in self.open.values():
            left.plays = False

    def take(self, said: Said) -> None:
        """A line of its."""
        self.num_lines, self.heard_s = self.num_lines + 1, time.monotonic()
        if said.opened:
            self.plays = True
            self.open.setdefault(said.opened["session_id"], Left(said.opened)).plays = True
        elif said.ended:
            self.open.pop(said.ended, None)
            self.num_ended += 1

    def died(self) -> list[Left]:
        """The guest has; returns the sessions that are not tried again, for it is the second one that they may have killed."""
        for left in self.open.values():
            left.deaths += left.plays
        lost = [left for left in self.open.values() if left.deaths > 1]
        self.open = {name: left for name, left in self.open.items() if left.deaths <= 1}
        return lost


async def main(worker: Worker) -> None:
    """Play the sessions of the run's gateways until the worker drains.

    Raises:
        ConfigError: the taskset cannot be loaded.
        LaunchError: guests die one after the other.
    """
    path = worker.run_dir.gateway_path(f"{worker.name}-sessions")
    sessions, failures = Sessions(_read(path)), 0
    worker.detail = lambda: {"sessions": len(sessions.open), "ended": sessions.num_ended}
    try:
        while not worker.draining.is_set():
            began_s, ended = time.monotonic(), sessions.num_ended
            why = await _keep(worker, sessions)
            if not why:
                return
            well = time.monotonic() - began_s > _WELL_S or sessions.num_ended > ended
            failures = 1 if well else failures + 1
            lost = sessions.died()
            logger.warning("event=guest_died reason=%r open=%d lost=%d failures=%d", why, len(sessions.open), len(lost), failures)
            await _end_all(lost, f"the process of its environment {why}, the second that played it")
            if failures >= _MOST_FAILURES:
                raise LaunchError(f"{failures} processes of the taskset in a row have died without ending an episode; the last {why}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.draining.wait(), pause_s(failures, first_s=0.5, most_s=10.0))
    finally:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_private(path, msgspec.json.encode([left.told for left in sessions.open.values()]))


def _read(path: Path) -> list[dict[str, Any]]:
    """The sessions that this worker had open when it drained last."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.MsgspecError):
        return []


async def _spec(worker: Worker, sessions: Sessions) -> Spec:
    """For a guest of the gateway that this worker has by its number; waits until there is one."""
    config = worker.config
    _, taskset = split(config.producer.function)
    worker.state = "waits for the gateway"
    while not (found := sorted(addresses(worker.run_dir).items())):  # noqa: ASYNC110 - another process writes its file
        await asyncio.sleep(_LOOK_S)
    _, address = found[worker.index % len(found)]
    return Spec(
        mode="serve",
        taskset=taskset,
        options=config.producer.options,
        model_dir=str(worker.run_dir.policy_dir(config)),
        model=POLICY,
        max_len=config.model.max_len,
        gateway=address,
        gateway_key=worker.run_dir.gateway_key(),
        sessions=config.producer.concurrency * config.group_size,
        idle_s=config.gateway.idle_timeout_s,
        adopted=tuple(left.told for left in sessions.open.values() if not left.deaths),
        suspects=tuple(left.told for left in sessions.open.values() if left.deaths),
    )


async def _keep(worker: Worker, sessions: Sessions) -> str:
    """A guest until it ends, and how it did; empty: the worker drains."""
    draining = asyncio.create_task(worker.draining.wait())
    try:
        finding = asyncio.create_task(_spec(worker, sessions))
        await asyncio.wait((finding, draining), return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            finding.cancel()
            return ""
        spec = finding.result()
        sessions.begin()
        async with guest(worker.config.producer.python, spec) as running:
            return await _watch(worker, sessions, running, asyncio.create_task(_hear(running, spec, sessions)), draining)
    finally:
        draining.cancel()


async def _watch(
    worker: Worker, sessions: Sessions, running: Guest, hearing: asyncio.Task[None], draining: asyncio.Task[Literal[True]]
) -> str:
    try:
        while not hearing.done() and not draining.done():
            await asyncio.wait((hearing, draining), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
            loaded = sessions.num_lines > 0
            worker.state = "running" if loaded else "loads the taskset"
            silent_s = time.monotonic() - sessions.heard_s
            if silent_s > (worker.config.producer.idle_timeout_s if loaded else _LOADING_S):
                return f"was held by code that blocks for {silent_s:.0f} s (producer.idle_timeout_s) and killed"
        if draining.done():
            return ""
        hearing.result()
        return f"ended with {describe_exit(await running.end(patience_s=LAST_WORDS_S))}"
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)


async def _hear(running: Guest, spec: Spec, sessions: Sessions) -> None:
    async for said in running.lines():
        if said.error and not sessions.plays:
            raise wrong(said, spec.taskset)
        sessions.take(said)


async def _end_all(lost: Sequence[Left], why: str) -> None:
    """End sessions that nobody plays any more. Best effort: what is left runs into the gateway's limit."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_END_S)) as http:

        async def end(left: Left) -> None:
            name = left.told["session_id"]
            try:
                async with http.post(f"{left.root}/rl/end_session", json={"failed": why[:1000]}) as answer:
                    logger.info("event=session_ended session=%s status=%d", name, answer.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning("event=session_not_ended session=%s error=%s", name, error)

        await asyncio.gather(*(end(left) for left in lost))
