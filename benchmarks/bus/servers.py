"""What a transport needs to be there, and its server where it has one."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.bus.plan import Transport
from streamrl.bus.server import NatsServer
from streamrl.errors import LaunchError

_READY_S = 20.0
_NEEDS: dict[Transport, tuple[str, ...]] = {
    Transport.STREAMRL: (),
    Transport.REDIS_ORJSON: ("redis", "orjson"),
    Transport.REDIS_PICKLE: ("redis",),
    Transport.ZMQ_MSGPACK: ("zmq",),
    Transport.RAY: ("ray",),
}


class Server(msgspec.Struct, frozen=True):
    """Where a transport's ends meet. `pid` is None where there is no process between them."""

    address: str
    pid: int | None = None


def missing(transport: Transport) -> str:
    """What the transport lacks on this machine and how to get it; empty: nothing."""
    lacking = [name for name in _NEEDS[transport] if importlib.util.find_spec(name) is None]
    if lacking:
        extra = "ray" if transport is Transport.RAY else "bench"
        return f"no Python package {' and '.join(lacking)}: pip install --editable '.[{extra}]'"
    if transport in (Transport.REDIS_ORJSON, Transport.REDIS_PICKLE) and shutil.which("redis-server") is None:
        return "no redis-server on PATH: install your system's package, for example apt install redis-server"
    return ""


@contextmanager
def serving(transport: Transport, scratch: Path) -> Generator[Server]:
    """The transport's server while the context lasts; its files go to `scratch`.

    Raises:
        LaunchError: it does not start.
    """
    if transport is Transport.STREAMRL:
        server = NatsServer(scratch / "nats")
        address = server.start()
        try:
            path = scratch / "bus.json"
            address.save(path)
            yield Server(str(path), server.pid)
        finally:
            server.stop()
    elif transport in (Transport.REDIS_ORJSON, Transport.REDIS_PICKLE):
        with _redis(scratch) as server:
            yield server
    elif transport is Transport.ZMQ_MSGPACK:
        yield Server(f"tcp://127.0.0.1:{_free_port()}")
    else:
        yield Server("")


@contextmanager
def _redis(scratch: Path) -> Generator[Server]:
    """A Redis in memory only."""
    port = _free_port()
    options = {"bind": "127.0.0.1", "port": str(port), "save": "", "appendonly": "no", "dir": str(scratch)}
    command = ["redis-server", *(part for name, value in options.items() for part in (f"--{name}", value))]
    log = scratch / "redis.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + _READY_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LaunchError(f"redis-server on port {port} did not become ready", hint=f"its last words: {log.read_text()[-300:]}")
            time.sleep(0.02)
        yield Server(f"127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
