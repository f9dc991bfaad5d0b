"""The embedded nats-server: ready when it says so, private, and never left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamrl.bus import BusAddress, connect
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.errors import BusUnavailable, ConfigError, LaunchError
from streamrl.schemas.subjects import Subjects
from streamrl.telemetry.logs import LOG_BYTES
from tests.support.errors import raises
from tests.support.processes import alive

pytestmark = pytest.mark.nats


async def test_messages_survive_stop_and_start_at_the_same_address(own_server: NatsServer) -> None:
    address = own_server.address
    bus = await connect(address, "run")
    await bus.publish(Subjects("run").marks, b"x")
    identity = (await bus.state("samples")).identity
    await bus.close()
    own_server.stop()
    assert not own_server.running
    assert own_server.start() == address
    bus = await connect(address, "run")
    state = await bus.state("samples")
    assert (state.last, state.identity) == (1, identity)
    await bus.close()


async def test_budgets_are_brought_up_to_date_and_other_runs_are_left_alone(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, "run", BusConfig(samples_bytes=1_000_000))
    await bus.publish(Subjects("run").marks, b"x")
    other = await connect(own_server.address, "run-samples", BusConfig(samples_bytes=3_000_000))
    again = await connect(own_server.address, "run", BusConfig(samples_bytes=2_000_000))
    assert [(await each.state("samples")).max_bytes for each in (bus, other, again)] == [2_000_000, 3_000_000, 2_000_000]
    assert (await other.state("samples")).last == 0
    await other.remove()
    assert (await bus.state("samples")).last == 1
    for each in (bus, other, again):
        await each.close()


def test_secrets_are_for_the_owner_only(own_server: NatsServer, tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    own_server.address.save(path)
    own_server.address.save(path)
    assert BusAddress.load(path) == own_server.address
    for secret in (path, own_server.directory / "nats-server.conf"):
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert own_server.address.password not in repr(own_server.address)
    with pytest.raises(ConfigError) as caught:
        BusAddress.load(tmp_path / "missing.json")
    assert "streamrl up" in caught.value.hint
    path.write_text('{"urll": "x"}')
    with pytest.raises(ConfigError):
        BusAddress.load(path)


def test_a_taken_port_is_a_named_error(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        server = NatsServer(tmp_path, port=port)
        with raises(LaunchError, port=port) as caught:
            server.start()
    assert "bus.port = 0" in caught.value.hint
    assert not server.running
    server.start()
    assert server.address.url.endswith(f":{port}")
    server.stop()


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where the store should be")
    with pytest.raises(LaunchError, match="directory") as caught:
        NatsServer(tmp_path).start()
    assert "nats-server.log" in caught.value.hint


def test_its_log_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the last 16 MiB and one before it; here of 4 KB, which every few refused clients fill."""
    monkeypatch.setattr("streamrl.bus.server.LOG_BYTES", 4000)
    server = NatsServer(tmp_path)
    address = server.start()
    for _ in range(200):
        with socket.create_connection(("127.0.0.1", int(address.url.rpartition(":")[2])), timeout=30) as client:
            client.sendall(b'CONNECT {"user": "nobody", "pass": "wrong"}\r\nPING\r\n')
            while client.recv(4096):
                pass
    server.stop()
    logs = list(tmp_path.glob("nats-server.log*"))
    assert server.log_path in logs
    assert len(logs) == 2
    assert max(log.stat().st_size for log in logs) < 5000


def test_a_start_that_fails_on_a_full_log_says_why(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        server = NatsServer(tmp_path, port=holder.getsockname()[1])
        server.log_path.write_bytes(b"[1] 2026/01/01 00:00:00.000000 [INF] filling\n" * (LOG_BYTES // 45 + 2))
        with raises(LaunchError, port=holder.getsockname()[1]) as caught:
            server.start()
    assert "bus.port = 0" in caught.value.hint


async def test_wrong_credentials_and_a_missing_server_are_told_apart(own_server: NatsServer) -> None:
    good = own_server.address
    with pytest.raises(BusUnavailable, match="refused user 'streamrl'") as caught:
        await connect(BusAddress(url=good.url, user=good.user, password="wrong"), "run")
    assert "bus.json" in caught.value.hint and "wrong" not in str(caught.value)
    with pytest.raises(BusUnavailable, match="refused"):
        await connect(BusAddress(url=good.url), "run")
    own_server.kill()
    with pytest.raises(BusUnavailable, match="no NATS server answered"):
        await connect(good, "run", patience_s=0.3)


PARENT = """
import sys, time
from pathlib import Path
from streamrl.bus.server import NatsServer
server = NatsServer(Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""


def test_the_server_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 60
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(pid)
