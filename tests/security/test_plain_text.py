"""Plain text off loopback is refused unless a key of that name allows it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from streamrl.bus.address import BusAddress
from streamrl.bus.permissions import OPERATOR, ROLES
from streamrl.bus.server import NatsServer
from streamrl.config.hosts import is_loopback, servers
from streamrl.config.load import load
from streamrl.config.tree import BusConfig, RunConfig
from streamrl.errors import ConfigError
from streamrl.runtime.credentials import certificate_of, users_of, write_cluster, write_credentials
from streamrl.runtime.rundir import RunDir
from tests.support.errors import raises
from tests.support.role_server import write_run


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / RunConfig().name)
    run.create()
    return run


@pytest.mark.parametrize(
    ("bus", "message"),
    [
        ('url = "nats://head-node:4222"', "got plain text to head-node"),
        ('url = "tls://a:1,nats://10.0.0.7:1"', "got plain text to 10.0.0.7"),
        ('url = "nats://127.0.0.1:4222,nats://0.0.0.0:1"', "got plain text to 0.0.0.0"),
        ('url = "tls://a:1"\nhost = "10.0.0.7"', "bus.host and bus.advertise are the embedded server's"),
    ],
)
def test_a_configuration_with_plain_text_off_loopback_is_refused(tmp_path: Path, bus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(write_run(tmp_path, steps=1, rest=f"[bus]\n{bus}\n"))


@pytest.mark.parametrize(
    "bus",
    [
        'url = "tls://head-node:4222"',
        'url = "nats://127.0.0.1:4222"',
        'url = "nats://localhost:4222,nats://[::1]:4222"',
        'url = "nats://head-node:4222"\nallow_plaintext = true',
        'host = "0.0.0.0"',
    ],
)
def test_other_configurations_are_taken(tmp_path: Path, bus: str) -> None:
    load(write_run(tmp_path, steps=1, rest=f"[bus]\n{bus}\n"))


def test_hosts_off_loopback_get_a_certificate_unless_plain_text_is_allowed(run: RunDir) -> None:
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert certificate_of(run, BusConfig(host=host)) is None
    assert certificate_of(run, BusConfig(host="0.0.0.0", allow_plaintext=True)) is None
    for host in ("0.0.0.0", "10.0.0.7", "head-node", ""):
        assert certificate_of(run, BusConfig(host=host)) is not None
    assert servers("tls://me:secret@a.b:4222, nats://[fd00::1]:1") == [("tls", "a.b"), ("nats", "fd00::1")]
    assert is_loopback("LOCALHOST") and not is_loopback("localhost.evil.org") and not is_loopback("")


def test_credentials_stay_the_same_over_a_resume_and_go_with_the_embedded_server(run: RunDir, tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "bus", port=4222)
    first = users_of(run)
    write_credentials(run, server, first)
    assert users_of(run) == first
    assert {user.name for user in first} == {OPERATOR, *ROLES}
    assert BusAddress.load(run.bus_path_of("producer")).user == "producer"
    run.role_path("reader").unlink()
    with raises(ConfigError, path=str(run.role_path("reader"))):
        BusAddress.load(run.bus_path_of("reader"))
    shutil.rmtree(run.credentials)
    write_credentials(run, server, second := users_of(run))
    assert users_of(run) == second and {user.password for user in second} & {user.password for user in first} == {first[0].password}
    run.create()
    token = run.engine_token()
    write_cluster(run, {OPERATOR: BusAddress(url="tls://cluster:4222", token="theirs")})
    assert BusAddress.load(run.bus_path_of("producer")).token == "theirs"
    assert run.engine_token() == token
    fresh = {user.password for user in users_of(run)}
    assert fresh.isdisjoint({user.password for user in first} | {"theirs"})


def test_a_missing_engine_token_is_named(run: RunDir) -> None:
    run.engine_token_path.unlink()
    with raises(ConfigError, path=str(run.engine_token_path)) as caught:
        run.engine_token()
    assert "copy it to hosts" in caught.value.hint
