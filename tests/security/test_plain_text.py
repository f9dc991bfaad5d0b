"""Plain text off loopback is refused unless a key allows it, certificates, and engines that ask for the run's token."""

import logging
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from streamrl.bus import BusAddress, connect
from streamrl.bus.certificates import certificate_for
from streamrl.bus.permissions import OPERATOR, ROLES
from streamrl.bus.server import NatsServer
from streamrl.config.hosts import is_loopback, servers
from streamrl.config.load import load
from streamrl.config.tree import BusConfig, RunConfig
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.server import EngineServer, serve
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import BusUnavailable, ConfigError, EngineError, LaunchError
from streamrl.runtime.credentials import certificate_of, users_of, write_cluster, write_credentials
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.tasks import Sampling
from tests.support.errors import raises
from tests.support.policies import make_model, script, start_engine
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


def test_directories_and_addresses_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    (tmp_path / "tls").write_text("a file")
    with raises(LaunchError, path=str(tmp_path / "tls")):
        certificate_for(tmp_path / "tls", ["127.0.0.1"])
    with raises(LaunchError, key="bus.host", got="203.0.113.7") as caught:
        NatsServer(tmp_path / "bus", host="203.0.113.7").start()
    assert "ip address" in caught.value.hint


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


TOKEN = "t0ken-of-the-run"
ROUTES = [
    ("POST", "/generate"),
    ("POST", "/abort_request"),
    ("GET", "/channel"),
    ("GET", "/health_generate"),
    ("GET", "/server_info"),
    ("GET", "/get_server_info"),
    ("GET", "/model_info"),
    ("GET", "/get_model_info"),
    ("GET", "/no/such/route"),
]


@asynccontextmanager
async def engine(tmp_path: Path) -> AsyncIterator[TableEngine]:
    directory = tmp_path / "model"
    running = await start_engine(directory, script(make_model(directory), {}), engine_id="e")
    try:
        yield running
    finally:
        await running.stop()


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[EngineServer]:
    async with engine(tmp_path) as running:
        server = await serve(running, token=TOKEN)
        try:
            yield server
        finally:
            await server.stop()


@pytest.mark.parametrize("given", [None, "", "Bearer ", "Bearer wrong", TOKEN, f"bearer {TOKEN}", f"Bearer {TOKEN} ", "Bearer t\xe9"])
async def test_every_route_but_health_asks_for_the_token(tmp_path: Path, given: str | None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    headers = {} if given is None else {"Authorization": given}
    async with serving(tmp_path) as server, aiohttp.ClientSession(server.address) as session:
        served = {str(route.resource.canonical) for route in _routes(server) if route.resource is not None}
        assert served == {path for _, path in ROUTES[:-1]} | {"/health"}
        for method, path in ROUTES:
            async with session.request(method, path, data=b"{}", headers=headers) as answer:
                # A header's trailing space is not part of its value.
                right = given == f"Bearer {TOKEN} "
                assert (answer.status == 401) is not right, path
                assert TOKEN not in await answer.text()
        async with session.get("/health", headers=headers) as answer:
            assert answer.status == 200
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("client", [HttpEngine, ChannelEngine])
async def test_a_client_with_the_token_is_served_and_one_without_is_told_why(tmp_path: Path, client: type[HttpEngine]) -> None:
    request = GenerateRequest(request_id="r", prompt_ids=(1, 2), sampling=Sampling(max_new_tokens=3), seeds=(7,))
    async with serving(tmp_path) as server:
        good, bad = client(server.address, token=TOKEN), client(server.address)
        try:
            assert sum(len(chunk.token_ids) for chunk in [chunk async for chunk in good.generate(request)]) >= 1
            assert (await good.info()).engine == "e"
            with pytest.raises(EngineError, match="expected the run's token") as caught:
                await anext(aiter(bad.generate(request)))
            assert "credentials/engine-token" in caught.value.hint
            with pytest.raises(EngineError, match="expected the run's token"):
                await bad.info()
        finally:
            await good.close()
            await bad.close()


async def test_an_engine_without_a_token_listens_on_loopback_only(tmp_path: Path) -> None:
    async with engine(tmp_path) as running:
        with raises(EngineError, host="0.0.0.0"):
            await serve(running, "0.0.0.0")
        server = await serve(running, "0.0.0.0", token=TOKEN)
        await server.stop()


def _routes(server: EngineServer) -> list[web.AbstractRoute]:
    assert server.runner is not None
    return list(server.runner.app.router.routes())
