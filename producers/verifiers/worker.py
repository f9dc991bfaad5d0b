"""The producer worker of a taskset: it keeps a guest running, and ends the sessions of one that died.

Leases, records and time limits are the gateway's; a guest is an agent like any other. Without a guest its sessions would end as `timeout`
after gateway.idle_timeout_s; this worker knows at once, and why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

import aiohttp

from streamrl.config.environments import split
from streamrl.errors import LaunchError
from streamrl.producers.gateway.worker import POLICY, addresses
from streamrl.producers.verifiers.guests import Guest, Said, Spec, guest, wrong
from streamrl.runtime.retries import pause_s
from streamrl.runtime.service import describe_exit

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


class Silent(Exception):
    """A guest whose event loop an environment holds."""


class Sessions:
    """What one guest has open, and how many it has ended."""

    def __init__(self) -> None:
        self.roots: dict[str, str] = {}
        self.num_ended = 0
        self.heard_s = time.monotonic()
        self.is_ready = False

    def take(self, said: Said) -> None:
        """A line of its."""
        self.heard_s, self.is_ready = time.monotonic(), True
        if said.opened:
            self.roots[said.opened] = said.root
        elif said.ended:
            self.roots.pop(said.ended, None)
            self.num_ended += 1


async def main(worker: Worker) -> None:
    """Play the sessions of the run's gateways until the worker drains.

    Raises:
        ConfigError: the taskset cannot be loaded.
        LaunchError: guests die one after the other.
    """
    failures, total = 0, 0
    while not worker.draining.is_set():
        sessions = Sessions()
        began_s = time.monotonic()
        why = await _keep(worker, await _spec(worker), sessions, total)
        total += sessions.num_ended
        if not why:
            return
        failures = 1 if time.monotonic() - began_s > _WELL_S or sessions.num_ended else failures + 1
        logger.warning("event=guest_died reason=%r sessions=%d failures=%d", why, len(sessions.roots), failures)
        await _end_all(sessions, f"the process of its environment {why}")
        if failures >= _MOST_FAILURES:
            raise LaunchError(f"{failures} processes of the taskset in a row have ended without an episode; the last {why}", hint="see its log")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(worker.draining.wait(), pause_s(failures, first_s=0.5, most_s=10.0))


async def _spec(worker: Worker) -> Spec:
    """For a guest of the gateway that this worker has by its number; waits until there is one."""
    config = worker.config
    _, taskset = split(config.producer.function)
    worker.state = "waits for the gateway"
    while not (found := sorted(addresses(worker.run_dir).items())):
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
        sessions=config.producer.concurrency * config.tasks.num_rollouts,
        idle_s=config.gateway.idle_timeout_s,
    )


async def _keep(worker: Worker, spec: Spec, sessions: Sessions, total: int) -> str:
    """A guest until it ends, and why it did; empty: the worker drains."""
    worker.state = "loads the taskset"
    worker.detail = lambda: {"sessions": len(sessions.roots), "ended": total + sessions.num_ended}
    async with guest(worker.config.producer.python, spec) as running:
        hearing = asyncio.create_task(_hear(running, spec, sessions))
        draining = asyncio.create_task(worker.draining.wait())
        try:
            while not hearing.done() and not draining.done():
                await asyncio.wait((hearing, draining), timeout=_TICK_S, return_when=asyncio.FIRST_COMPLETED)
                worker.state = "running" if sessions.is_ready else "loads the taskset"
                silent_s = time.monotonic() - sessions.heard_s
                limit_s = worker.config.producer.idle_timeout_s if sessions.is_ready else _LOADING_S
                if silent_s > limit_s:
                    return f"was held for {silent_s:.0f} s by code that blocks (producer.idle_timeout_s) and killed"
            if hearing.done():
                hearing.result()
                return f"ended with {describe_exit(await running.end())}"
            await _end_all(sessions, "its producer drains", fail=False)
            return ""
        finally:
            for task in (hearing, draining):
                task.cancel()
            await asyncio.gather(hearing, draining, return_exceptions=True)


async def _hear(running: Guest, spec: Spec, sessions: Sessions) -> None:
    async for said in running.lines():
        if said.error and not sessions.is_ready:
            raise wrong(said, spec.taskset)
        sessions.take(said)


async def _end_all(sessions: Sessions, why: str, *, fail: bool = True) -> None:
    """End the sessions of a guest that is no more. Best effort: what is left runs into the gateway's limit."""
    if not sessions.roots or not fail:
        return
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_END_S)) as http:

        async def end(name: str, root: str) -> None:
            try:
                async with http.post(f"{root}/rl/end_session", json={"failed": why[:1000]}) as answer:
                    logger.info("event=session_ended session=%s status=%d", name, answer.status)
            except (aiohttp.ClientError, TimeoutError) as error:
                logger.warning("event=session_not_ended session=%s error=%s", name, error)

        await asyncio.gather(*(end(name, root) for name, root in sessions.roots.items()))
