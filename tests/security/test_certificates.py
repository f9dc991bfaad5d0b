from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from streamrl.bus import BusAddress, connect
from streamrl.bus.certificates import certificate_for
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.errors import BusUnavailable, LaunchError
from tests.support.errors import raises

QUICK = BusConfig(patience_s=10.0)


def test_a_certificate_is_kept_while_it_covers_the_hosts_and_the_authoritys_key_is_not(tmp_path: Path) -> None:
    first = certificate_for(tmp_path / "tls", ["127.0.0.1", "head-node"])
    ssl.create_default_context(cadata=first.authority)
    key = first.key_path.read_bytes()
    assert certificate_for(tmp_path / "tls", ["head-node"]).authority == first.authority
    assert first.key_path.read_bytes() == key
    other = certificate_for(tmp_path / "tls", ["127.0.0.1", "head-node", "::1"])
    assert other.authority != first.authority and first.key_path.read_bytes() != key
    other.path.write_text("not a certificate")
    assert certificate_for(tmp_path / "tls", ["::1"]).authority != other.authority
    assert {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()} == dict.fromkeys(
        ("ca.pem", "server.pem", "server.key"), 0o600
    )
    assert [path.name for path in (tmp_path / "tls").iterdir() if b"PRIVATE KEY" in path.read_bytes()] == ["server.key"]


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "tls").write_text("a file")
    with raises(LaunchError, path=str(tmp_path / "tls")):
        certificate_for(tmp_path / "tls", ["127.0.0.1"])


@pytest.mark.nats
async def test_clients_trust_the_runs_authority_and_no_other(tmp_path: Path) -> None:
    mine, other = certificate_for(tmp_path / "tls", ["127.0.0.1"]), certificate_for(tmp_path / "other", ["127.0.0.1"])
    server = NatsServer(tmp_path / "bus", tls=mine)
    server.start()
    try:
        good = server.address
        assert good.url.startswith("tls://")
        await (await connect(good, "run", QUICK)).close()
        for authority in (other.authority, ""):
            with pytest.raises(BusUnavailable, match="not trusted"):
                await connect(BusAddress(url=good.url, user=good.user, password=good.password, ca_pem=authority), "run", QUICK)
        elsewhere = NatsServer(tmp_path / "elsewhere", tls=certificate_for(tmp_path / "named", ["head-node"]))
        elsewhere.start()
        try:
            with pytest.raises(BusUnavailable, match="not trusted"):
                await connect(elsewhere.address, "run", QUICK)
        finally:
            elsewhere.stop()
    finally:
        server.stop()


def test_an_address_that_is_not_this_machines_is_a_named_error(tmp_path: Path) -> None:
    with raises(LaunchError, key="bus.host", got="203.0.113.7") as caught:
        NatsServer(tmp_path / "bus", host="203.0.113.7").start()
    assert "ip address" in caught.value.hint
