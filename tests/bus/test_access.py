"""Logging in: TLS, tokens, files with secrets, missing rights, a connection that the server ends for good."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus import BusAddress, connect
from streamrl.bus.certificates import Certificate
from streamrl.bus.jetstream.connection import Connection
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.errors import BusError, BusUnavailable, ConfigError
from streamrl.schemas.subjects import Subjects
from tests.support.errors import raises
from tests.support.processes import until

pytestmark = pytest.mark.nats

QUICK = BusConfig(patience_s=60.0)


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=nats", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


async def test_tls_with_a_token(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = NatsServer(tmp_path / "bus", tls=Certificate(*certificate, authority=""), token="a-token")
    server.start()
    try:
        token_file = tmp_path / "token"
        token_file.write_text("a-token\n")
        config = BusConfig(url=server.address.url, token_file=str(token_file), ca_file=str(certificate[0]), patience_s=60.0)
        address = BusAddress.from_config(config)
        assert address.url.startswith("tls://")
        bus = await connect(address, "run", config)
        assert (await bus.publish(Subjects("run").marks, b"x")).sequence == 1
        server.kill()
        server.start()
        assert (await bus.publish(Subjects("run").marks, b"x")).sequence == 2
        await bus.close()
        with pytest.raises(BusUnavailable, match="not trusted") as caught:
            await connect(BusAddress(url=server.address.url, token="a-token"), "run", QUICK)
        assert "bus.ca_file" in caught.value.hint
        with pytest.raises(BusUnavailable, match="refused"):
            await connect(BusAddress(url=server.address.url, token="other", ca_file=str(certificate[0])), "run", QUICK)
    finally:
        server.stop()


def test_files_named_in_the_configuration_must_be_readable(tmp_path: Path) -> None:
    with raises(ConfigError, key="bus.url"):
        BusAddress.from_config(BusConfig())
    with raises(ConfigError, key="bus.password_file"):
        BusAddress.from_config(BusConfig(url="nats://x:1", user="u", password_file=str(tmp_path / "missing")))


@pytest.mark.parametrize("key", ["ca_file", "credentials_file"])
async def test_a_missing_certificate_or_credentials_file_is_named(tmp_path: Path, key: str) -> None:
    address = BusAddress.from_config(replace(BusConfig(url="nats://127.0.0.1:1"), **{key: str(tmp_path / "missing")}))
    with raises(ConfigError, key=f"bus.{key}"):
        await connect(address, "run", QUICK)


async def test_a_connection_that_the_server_ends_comes_back(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, "run", QUICK)
    reader = asyncio.ensure_future(anext(bus.read("samples", after=0)))
    await asyncio.sleep(0.1)
    connection: Connection = bus.connection
    # Larger than the server takes: it answers with an error and closes, after which the client never reconnects by itself.
    await connection.client._send_publish("run.marks", "", bytes(9 << 20), 9 << 20, None)
    await until(lambda: connection.generation != 1)
    assert (await bus.publish("run.marks", b"after")).sequence == 1
    assert (await reader).body == b"after"
    await bus.publish("run.tasks.main", b"t")
    assert len(await bus.claim("main", max=1, wait_s=1.0)) == 1
    await bus.close()


async def test_a_server_without_the_runs_streams_says_so(own_server: NatsServer) -> None:
    bus = await connect(own_server.address, "run", QUICK, create=False)
    with raises(BusError, subject="run.marks"):
        await bus.publish("run.marks", b"x")
    with pytest.raises(BusError, match="run-samples"):
        await bus.state("samples")
    await bus.close()
