"""The gateway worker: a producer whose rollouts are made by agents that ask it over HTTP."""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from streamrl.config.check_sampling import check_drawn, check_grammars, check_vocabulary
from streamrl.errors import LaunchError
from streamrl.producers.factory import policy_tokenizer
from streamrl.producers.gateway.guards import SHARE
from streamrl.producers.gateway.journal import Journal
from streamrl.producers.gateway.keys import Keys
from streamrl.producers.gateway.server import GatewayServer
from streamrl.producers.gateway.session import Bounds
from streamrl.producers.gateway.sessions import Sessions
from streamrl.producers.gateway.verbs import Verbs
from streamrl.producers.late import LateRewards
from streamrl.producers.rollouts import serve
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.subjects import MAIN_SOURCE, WARMUP_SOURCE
from streamrl.schemas.tasks import Sampling
from streamrl.system import is_loopback, write_private

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker

logger = logging.getLogger(__name__)

POLICY = "policy"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """Where a gateway listens, and which process it is."""

    pid: int
    address: str


async def main(worker: Worker, *, port: int | None = None, listens: Callable[[str], None] = lambda address: None) -> None:
    """Serve agents until the worker drains.

    Args:
        worker: this one.
        port: to listen on; None: as `gateway.port` says.
        listens: told the address.

    Raises:
        LaunchError: its address is taken.
    """
    config = worker.config.gateway
    sessions = Sessions(
        Journal(worker.bus.turns),
        Bounds(
            max_turns=config.max_turns,
            max_calls=config.max_calls,
            call_s=config.call_timeout_s,
            max_bytes=worker.config.bus.turns_bytes // SHARE,
        ),
        idle_s=config.idle_timeout_s,
        total_s=worker.config.producer.rollout_timeout_s,
        own_prompts=config.prompts == "any",
        drawable=_drawable(worker),
        num_rollouts=worker.config.group_size,
    )
    keys = Keys(worker.run_dir.gateway_key(), worker.config.run.name)
    verbs = Verbs(
        sessions,
        keys,
        LateRewards.of(worker),
        wait_s=config.wait_s,
        model=POLICY,
        show_label=config.show_label,
        max_len=worker.config.model.max_len,
    )
    server = GatewayServer(
        sessions,
        verbs,
        keys,
        models=tuple(dict.fromkeys((POLICY, worker.config.run.name))),
        max_len=worker.config.model.max_len,
        max_body_bytes=config.max_body_bytes,
        max_calls=config.max_calls,
        wait_s=config.wait_s,
    )
    worker.detail = lambda: {
        "address": server.address,
        "sessions": sessions.num_open,
        "waiting": sessions.num_waiting,
        "calls_per_s": round(sessions.calls.per_s, 1),
    }
    await _listen(worker, server, port)
    listens(server.address)
    background = [asyncio.create_task(sessions.look()), asyncio.create_task(_close_when_draining(worker, sessions))]
    try:
        await serve(
            worker,
            "single_turn",
            sources=(MAIN_SOURCE, WARMUP_SOURCE) if worker.config.warmup.max_steps else (MAIN_SOURCE,),
            front=sessions,
            concurrency=max(1, math.ceil(config.max_sessions / worker.config.group_size)),
        )
    finally:
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        sessions.close()
        await server.stop()


def _drawable(worker: Worker) -> Callable[[Sampling], None]:
    """What a call may ask for is what a row of the data may."""
    config, (tokenizer, _) = worker.config, policy_tokenizer(worker)

    def check(sampling: Sampling) -> None:
        check_drawn(config, sampling, "sampling", trained=True)
        check_vocabulary(sampling, tokenizer.vocab_size, "sampling")
        check_grammars(config, sampling, "sampling")

    return check


async def _listen(worker: Worker, server: GatewayServer, port: int | None) -> None:
    """At the port that is named, else at the one that it had before, so that agents find it again; else at any."""
    config, path = worker.config.gateway, worker.run_dir.gateway_path(worker.name)
    if port or (port is None and config.port):
        await server.start(config.host, port or config.port + worker.index)
    else:
        try:
            await server.start(config.host, _port_before(path))
        except LaunchError:
            await server.start(config.host, 0)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    write_private(path, msgspec.json.encode(Address(pid=os.getpid(), address=server.address)))
    if not is_loopback(config.host):
        await worker.notice(f"it listens on {config.host} in plain HTTP: whoever sees the network reads keys and conversations")
    await worker.notice(f"sessions are served at {server.address}; the key to start them is in {worker.run_dir.gateway_key_path}")
    logger.info("event=gateway_listening address=%s", server.address)


def _port_before(path: Path) -> int:
    found = _address(path)
    port = found.address.rpartition(":")[2] if found is not None else ""
    return int(port) if port.isascii() and port.isdigit() and int(port) < 65536 else 0


def _address(path: Path) -> Address | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except (OSError, msgspec.MsgspecError):
        return None


def addresses(run: RunDir) -> dict[str, str]:
    """Where the gateways of a run were seen last, by worker."""
    found = {path.stem: _address(path) for path in sorted((run.path / "gateways").glob("gateway-*.json"))}
    return {name: one.address for name, one in found.items() if one is not None}


async def _close_when_draining(worker: Worker, sessions: Sessions) -> None:
    await worker.draining.wait()
    sessions.close()
