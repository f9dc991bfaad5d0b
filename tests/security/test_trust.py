"""Whose code runs, whose folders are trusted, and which secrets are kept apart."""

import asyncio
import logging
import os
import re
import shutil
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import aiohttp
import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

from streamrl.bridges.slime.section import BESIDE_FILTER, PLACES
from streamrl.bus import BusAddress, connect
from streamrl.bus.certificates import certificate_for
from streamrl.bus.memory.bus import MemoryBus
from streamrl.bus.permissions import OPERATOR, ROLES
from streamrl.bus.server import NatsServer
from streamrl.cli import main
from streamrl.config.code import check_trust, loss_code, rollout_code
from streamrl.config.evaluation import EvaluationConfig, EvaluationSetConfig, SetRewardConfig
from streamrl.config.filters import FiltersConfig
from streamrl.config.load import convert, dump, load
from streamrl.config.paths import FUNCTIONS
from streamrl.config.secret_options import with_secrets, without_secrets
from streamrl.config.slime import SlimeConfig
from streamrl.config.tree import BusConfig, Config, DataConfig, ProducerConfig, RewardConfig, RunConfig
from streamrl.consumers.training.checkpoints import latest_key, read_latest
from streamrl.consumers.training.ledger import take_fence
from streamrl.consumers.training.loop import raise_grant
from streamrl.data.problems import Problem, Problems
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.http import HttpEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.server import EngineServer, serve
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import BusUnavailable, ConfigError, EngineError, LaunchError, SchemaError, WeightSyncError
from streamrl.launch.down import stop_run
from streamrl.producers.attempts import Attempts
from streamrl.producers.checkpoints import RolloutCheckpoints
from streamrl.producers.feeder import Feeder
from streamrl.runtime.credentials import certificate_of, users_of, write_cluster, write_credentials
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.system import is_loopback, servers
from streamrl.weights.factory import weights_directory
from streamrl.weights.pins import Pin, Pins
from streamrl.weights.shm import check_own
from tests.security.conftest import QUICK
from tests.support.buses import serving as serving_bus
from tests.support.errors import raises
from tests.support.policies import make_model, script, start_engine
from tests.support.role_server import write_run
from tests.support.runs import bare_run, named_run

PLANTED = "planted-secret-of-the-user"


def config(**options: object) -> Config:
    return Config(run=RunConfig(name="demo"), producer=ProducerConfig(options=dict(options)), reward=RewardConfig(options=dict(options)))


@pytest.mark.parametrize(
    "name", ["api_key", "API-KEY", "openai_apikey", "password", "hf_token", "secret", "client_secret", "AWS_SECRET_KEY"]
)
def test_options_that_look_like_secrets_are_not_in_the_configuration(name: str) -> None:
    whole = config(**{name: PLANTED, "temperature": 0.5})
    bare, taken = without_secrets(whole)
    assert PLANTED not in dump(bare)
    assert bare.producer.options == {"temperature": 0.5}
    assert taken == {"producer": {name: PLANTED}, "reward": {name: PLANTED}}
    assert with_secrets(bare, taken) == whole


@pytest.mark.parametrize("options", [{"max_new_tokens": 5}, {"token": 7}, {"label_key": "answer"}, {"stop_tokens": "x"}, {"api_key": ""}])
def test_others_stay(options: dict[str, object]) -> None:
    whole = config(**options)
    assert without_secrets(whole) == (whole, {})


def test_a_worker_of_user_code_gets_them_back(tmp_path: Path) -> None:
    run = bare_run(tmp_path / "demo")
    whole = config(api_key=PLANTED)
    bare, taken = without_secrets(whole)
    run.write_config(bare)
    run.write_secret_options(taken)
    assert run.options_path.stat().st_mode & 0o077 == 0
    assert run.with_secret_options(run.load_config()) == whole
    run.options_path.write_text("{")
    with pytest.raises(ConfigError):
        run.with_secret_options(run.load_config())
    run.write_secret_options({})
    assert run.with_secret_options(run.load_config()) == bare


@pytest.mark.parametrize("text", ["", "\n", "  \n"])
def test_an_empty_secret_lets_nobody_in(tmp_path: Path, text: str) -> None:
    run = bare_run(tmp_path / "demo")
    run.engine_token_path.write_text(text)
    with pytest.raises(ConfigError):
        run.engine_token()
    for key in ("token_file", "password_file"):
        named = replace(BusConfig(url="nats://somewhere:4222"), **{key: str(run.engine_token_path)})
        with raises(ConfigError, key=f"bus.{key}"):
            BusAddress.from_config(named)


def test_code_of_others_needs_a_word() -> None:
    named = {"loss.policy": "evil.py:loss"}
    check_trust(named, "", trusted=False)
    check_trust({}, "the recording x", trusted=False)
    check_trust(named, "the recording x", trusted=True)
    with raises(ConfigError, key="loss.policy") as caught:
        check_trust(named, "the recording x", trusted=False)
    assert "evil.py:loss" in caught.value.message


SETS = (
    EvaluationSetConfig(name="a", path="a.jsonl", reward=SetRewardConfig(kind="judge", options={"url": "http://evil/v1", "model": "m"})),
)


@pytest.mark.parametrize(
    ("words", "sections", "said"),
    [
        (["worker", "producer", "--run"], {"producer": ProducerConfig(function="evil.py:f")}, "producer.function"),
        (["worker", "evaluator", "--run"], {"evaluation": EvaluationConfig(sets=SETS)}, "evaluation.sets[a].reward.options.url"),
        (["worker", "feeder", "--run"], {"data": DataConfig(curriculum="evil.py:f")}, "data.curriculum"),
        (["rewarder", "--run"], {"reward": RewardConfig(workers=1, kind="judge", options={"url": "http://evil/v1"})}, "reward.options.url"),
        (["reward", "--check", "ROWS"], {"reward": RewardConfig(kind="evil.py:f")}, "reward.kind"),
        (["eval"], {"evaluation": EvaluationConfig(sets=SETS)}, "evaluation.sets[a].reward.options.url"),
    ],
)
def test_verbs_that_run_what_anothers_run_names_ask_first(
    words: list[str],
    sections: dict[str, Any],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = named_run(tmp_path / "demo", **sections)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"completion": "7"}\n')
    monkeypatch.setattr(RunDir, "foreign", "a run of user 12345")
    assert main([*(str(rows) if word == "ROWS" else word for word in words), str(run.path)]) == 1
    error = capsys.readouterr().err
    assert "user 12345 names what" in error and said in error and "--trust-code" in error


def test_every_function_of_the_configuration_is_known() -> None:
    user = "file.py:name"
    loss = msgspec.structs.replace(Config().loss, advantage=user, policy=user, slime_loss=user)
    whole = Config(
        loss=loss,
        producer=ProducerConfig(function=user),
        reward=RewardConfig(kind=user),
        filters=FiltersConfig(function=user),
        data=DataConfig(curriculum=user),
        slime=SlimeConfig(**dict.fromkeys(BESIDE_FILTER, user)),
    )
    moved = {f"slime.{place.flag}": f"{place.section}.{place.key}" for place in PLACES}
    assert {*loss_code(whole), *rollout_code(whole)} == set(FUNCTIONS) - moved.keys()
    for place in PLACES:
        config = convert({"slime": {place.flag: user}, "data": {"train": "rows.jsonl"}}, where="test")
        named = {**loss_code(config), **rollout_code(config)}
        assert named[f"{place.section}.{place.key}"] == place.prefix + user


def test_a_folder_for_weights_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "weights"
    made.mkdir(mode=0o700)
    check_own(made)
    check_own(tmp_path / "absent")
    link = tmp_path / "link"
    link.symlink_to(made)
    file = tmp_path / "file"
    file.touch()
    for path in (link, file):
        with raises(WeightSyncError, path=str(path)):
            check_own(path)
    made.chmod(0o777)
    with pytest.raises(WeightSyncError):
        check_own(made)


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_refused_and_not_removed(tmp_path: Path) -> None:
    run = named_run(tmp_path / "demo")
    left = weights_directory(Config().weights, "demo", run.path)
    left.mkdir(mode=0o700)
    try:
        os.chown(left, 12345, -1)
        with pytest.raises(WeightSyncError):
            check_own(left)
        with pytest.raises(WeightSyncError):
            stop_run(run, now=False, timeout_s=0.0)
        assert left.is_dir()
    finally:
        left.rmdir()
    os.chown(run.path, 12345, -1)
    assert run.foreign == "a run of user 12345"


ANSWER = b'{"type":"io.nats.jetstream.api.v1.stream_info_response","error":{"code":404}}'
PROBLEMS = Problems(problems=(Problem(row=0, line=1, prompt_ids=(0,), prompt="p", label="l"),), digest="digest")


@pytest.fixture
def memory_bus(run_id: str) -> MemoryBus:
    return MemoryBus(run_id)


@pytest.mark.parametrize("value", [ANSWER, b"-1", b"1.5", b"\xff\x00", "٣".encode()])
async def test_a_fence_that_is_no_number_is_named(memory_bus: MemoryBus, value: bytes) -> None:
    await memory_bus.kv.put("fences/main", value)
    with pytest.raises(SchemaError, match="key fences/main") as caught:
        await take_fence(memory_bus, "main")
    assert "nats kv put" in caught.value.hint
    await memory_bus.kv.put("fences/main", b"41")
    assert await take_fence(memory_bus, "main") == 42


@pytest.mark.parametrize("key", ["no-version/a", "1/a", "1-2-3/a", "1-2", "1-2/a/b", f"1-{'9' * 5000}/a", "-1/a"])
async def test_a_pin_that_is_none_is_passed_over(memory_bus: MemoryBus, key: str) -> None:
    pins = Pins(memory_bus.kv, "policy")
    await memory_bus.kv.put(f"pins/policy/{key}", b"")
    await pins.hold(Version(0, 3), "evaluator-0")
    assert await pins.versions() == {Version(0, 3)}
    watching = cast(AsyncGenerator[Pin], pins.watch())
    assert await anext(watching) == Pin(Version(0, 3), "evaluator-0")
    await watching.aclose()


async def test_deaths_that_are_no_count_are_none(memory_bus: MemoryBus) -> None:
    for value in (ANSWER, b"9" * 5000, b"-1"):
        await memory_bus.kv.put("attempts/7", value)
        assert await Attempts(memory_bus).load(7) == 0


async def test_grants_pointers_and_checkpoints_that_are_none_are_named_or_passed_over(memory_bus: MemoryBus, run_id: str) -> None:
    for key in ("granted", latest_key("main")):
        await memory_bus.kv.put(key, ANSWER)
    feeder = Feeder(memory_bus, Subjects(run_id), Config(run=RunConfig(name=run_id)), PROBLEMS)
    async with asyncio.timeout(60):
        with pytest.raises(ExceptionGroup) as group:
            await feeder.run()
    assert [type(error) for error in group.value.exceptions] == [SchemaError] and "key granted" in str(group.value.exceptions[0])
    with pytest.raises(SchemaError, match="key granted"):
        await raise_grant(memory_bus, Grant(granted=3, version=0, retired=0))
    with pytest.raises(SchemaError, match="key latest/main"):
        await read_latest(memory_bus, "main")
    mine = RolloutCheckpoints(memory_bus)
    await mine.save(7, 0, b"state")
    await memory_bus.kv.put("checkpoints/7/x", ANSWER)
    assert await RolloutCheckpoints(memory_bus).load(7) == {0: b"state"}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return bare_run(tmp_path / RunConfig().name)


@pytest.mark.parametrize(
    ("bus", "message"),
    [
        ('url = "nats://head-node:4222"', "got plain text to head-node"),
        ('url = "tls://a:1,nats://10.0.0.7:1"', "got plain text to 10.0.0.7"),
        ('url = "nats://127.0.0.1:4222,nats://0.0.0.0:1"', "got plain text to 0.0.0.0"),
        ('url = "tls://a:1"\nhost = "10.0.0.7"', "bus.host and bus.advertise are the embedded server's"),
        ('url = "tls://head-node:4222"', ""),
        ('url = "nats://127.0.0.1:4222"', ""),
        ('url = "nats://localhost:4222,nats://[::1]:4222"', ""),
        ('url = "nats://head-node:4222"\nallow_plaintext = true', ""),
        ('host = "0.0.0.0"', ""),
    ],
)
def test_a_configuration_with_plain_text_off_loopback_is_refused_and_no_other(tmp_path: Path, bus: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
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
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "tls").iterdir()}
    assert modes == dict.fromkeys(("ca.pem", "server.pem", "server.key"), 0o600)
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
    with serving_bus(NatsServer(tmp_path / "bus", tls=mine)) as server:
        good = server.address
        assert good.url.startswith("tls://")
        await (await connect(good, "run", QUICK)).close()
        for authority in (other.authority, ""):
            with pytest.raises(BusUnavailable, match="not trusted"):
                await connect(BusAddress(url=good.url, user=good.user, password=good.password, ca_pem=authority), "run", QUICK)
        elsewhere = NatsServer(tmp_path / "elsewhere", tls=certificate_for(tmp_path / "named", ["head-node"]))
        with serving_bus(elsewhere), pytest.raises(BusUnavailable, match="not trusted"):
            await connect(elsewhere.address, "run", QUICK)


TOKEN = "t0ken-of-the-run"
GETS = ("channel", "health_generate", "server_info", "get_server_info", "model_info", "get_model_info", "no/such/route")
ROUTES = [("POST", "/generate"), ("POST", "/abort_request"), *(("GET", f"/{name}") for name in GETS)]


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
