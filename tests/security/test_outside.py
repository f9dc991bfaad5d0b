"""A nats-server that somebody else runs, and a producer that reaches a run from outside."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from streamrl.bus import BusAddress, connect
from streamrl.bus.permissions import OPERATOR, ROLES
from streamrl.bus.protocol import Bus
from streamrl.bus.server import find_binary
from streamrl.cli import main
from streamrl.config.load import load
from streamrl.config.tree import BusConfig, Config
from streamrl.doctor.accounts import variable
from streamrl.doctor.run_checks import check_logins
from streamrl.errors import ConfigError, Forbidden
from streamrl.monitor.runs import describe
from streamrl.monitor.status import ONE_LOGIN, RunStatus, print_status
from streamrl.page.access import page_token
from streamrl.producers.gateway.worker import addresses
from streamrl.runtime.credentials import logins, write_cluster
from streamrl.runtime.kinds import inherited
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry
from tests.security.conftest import client_of, wire_of
from tests.support.harness import read_ledger
from tests.support.needs import need
from tests.support.processes import descendants
from tests.support.raw_http import head, status
from tests.support.raw_http import told as told_by
from tests.support.role_server import started, trained, until, write_run
from tests.support.runs import bare_run


def check_nothing_was_refused(run: RunDir, place: Path) -> None:
    said = (place / "out").read_text() + "".join(path.read_text() for path in run.logs.glob("*.log"))
    assert "orbidden" not in said and "lacks this right" not in said and "ermissions" not in said


EACH = "user = 'demo-{role}'\npassword_file = 'secrets/{role}'\n"


@pytest.fixture
def outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """A server as its administrator sets it up from the printed block, and the TOML of a run on it."""
    (tmp_path / "secrets").mkdir()
    for role in (OPERATOR, *ROLES):
        (tmp_path / "secrets" / role).write_text(f"secret-of-{role}\n")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    toml = write_run(tmp_path, steps=100_000, checkpoint_every=2, rest=f"[bus]\nurl = 'nats://127.0.0.1:{port}'\n{EACH}")
    assert main(["doctor", str(toml), "--nats-accounts"]) == 0
    block = capsys.readouterr().out
    assert "secret-of" not in block
    config = tmp_path / "server.conf"
    config.write_text(
        f"port: {port}\nhost: 127.0.0.1\nmax_payload: 8MB\njetstream {{ store_dir: {json.dumps(str(tmp_path / 'store'))} }}\n{block}"
    )
    passwords = {variable("demo", role).removeprefix("$"): f"secret-of-{role}" for role in (OPERATOR, *ROLES)}
    server = subprocess.Popen([find_binary(), "-c", config], env={**os.environ, **passwords}, stderr=subprocess.DEVNULL)
    yield toml
    server.terminate()
    server.wait()


@pytest.mark.nats
@pytest.mark.slow
async def test_a_run_trains_with_a_login_for_each_role_and_goes_on(outside: Path, tmp_path: Path) -> None:
    for _ in range(2):
        before = trained(tmp_path)  # the first run may have trained any number of versions when it is stopped
        async with started(["up", str(outside), "--plain"], tmp_path) as up:
            await until(lambda: trained(tmp_path) >= before + 2, up, tmp_path)  # noqa: B023
            up.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(up.wait(), 90) == 0, (tmp_path / "out").read_text()[-3000:]
    run = RunDir(tmp_path / "runs" / "demo")
    assert {role: BusAddress.load(run.bus_path_of(role)).user for role in ROLES} == {role: f"demo-{role}" for role in ROLES}
    config = load(outside).bus
    operator = await connect(BusAddress.from_config(config), "demo", config)
    assert (await operator.state("ledger")).messages >= 6
    reader = await connect(BusAddress.from_config(config, "reader"), "demo", config, create=False)
    with pytest.raises(Forbidden):
        await reader.trim("samples", through=1)
    for api in ("$JS.API", "$STREAMRL.API"):
        await wire_of(reader).send("$STREAMRL.API.DIRECT.GET.demo-dead", b'{"seq":1}', f"{api}.STREAM.DELETE.demo-ledger")
    await client_of(reader).flush()
    await asyncio.sleep(0.3)
    assert (await operator.state("ledger")).messages >= 6
    check_nothing_was_refused(run, tmp_path)
    await reader.close()
    await operator.close()


def cluster(tmp_path: Path, user: str, password: str) -> BusConfig:
    return BusConfig(url="tls://cluster:4222", user=user, password_file=str(tmp_path / password))


def test_one_login_is_written_once_and_said_to_separate_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = bare_run(tmp_path / "demo")
    (tmp_path / "one").write_text("secret\n")
    for role in (OPERATOR, *ROLES):
        (tmp_path / f"each-{role}").write_text(f"{role}\n")
    shared, each = cluster(tmp_path, "all", "one"), cluster(tmp_path, "all", "each-{role}")
    write_cluster(run, logins(each))
    assert [BusAddress.load(run.bus_path_of(role)).password for role in ROLES] == list(ROLES)
    assert len({BusAddress.load(run.bus_path_of(role)).inbox_prefix for role in ROLES}) == len(ROLES)
    write_cluster(run, logins(shared))
    assert {BusAddress.load(run.bus_path_of(role)).password for role in ROLES} == {"secret"}
    assert check_logins(Config(bus=shared)).state == "warn" and check_logins(Config(bus=each)).state == "ok"
    for one_login in (True, False):
        print_status(RunStatus(line=describe(run), numbers=None, one_login=one_login), as_json=False)
        assert (ONE_LOGIN in capsys.readouterr().out) is one_login


def test_a_missing_secret_or_configuration_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "each-operator").write_text("x")
    with pytest.raises(ConfigError, match="each-trainer"):
        logins(cluster(tmp_path, "all", "each-{role}"))
    assert main(["doctor", "--nats-accounts"]) != 0
    assert "needs a TOML file" in capsys.readouterr().err


AGENT = """
async def agent(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    chat.user("1")
    await chat.generate()
    return chat.episode()
"""


@pytest.mark.process
async def test_a_producer_of_another_host_carries_a_run(tmp_path: Path) -> None:
    need("hosts")
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there / "home", here / "home"):
        place.mkdir(parents=True)
    write_run(here, steps=10_000, producer="workers = 0")
    (there / "agent.py").write_text(AGENT)
    async with started(["up", "demo.toml", "--plain", "--set", "warmup.max_steps=0"], here) as up:
        await until(lambda: RunDir(here / "runs" / "demo").exists and "starting" in (here / "out").read_text(), up, here)
        async with started(["credentials", "demo", "--out", str(there / "demo.attach")], here) as export:
            assert await export.wait() == 0, (here / "out").read_text()
        # Of the run's folder nothing is seen there.
        hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{here}" && exec "$@"', "sh")
        command = ["attach", "agent.py:agent", "--credentials", "demo.attach"]
        home = {"HOME": str(there / "home")}
        async with started(command, there, prefix=hidden, surroundings=home) as guest:
            assert await guest.wait() == 1
        assert "reward is user code" in (there / "out").read_text()
        (there / "reward.py").write_text("def letters(task, episode):\n    return 1.0\n")
        async with started([*command, "--reward", "reward.py:letters"], there, prefix=hidden, surroundings=home) as guest:
            assert await guest.wait() == 2
        assert "run demo was started" in (there / "out").read_text()
        shutil.copy(here / "reward.py", there / "reward.py")
        async with started([*command, "--reward", "reward.py:letters"], there, prefix=hidden, surroundings=home) as guest:
            await until(lambda: trained(here) >= 20 or guest.returncode is not None, up, here)
            assert guest.returncode is None, (there / "out").read_text()
            guest.terminate()
            assert await guest.wait() == 0
        assert "has left run demo" in (there / "out").read_text()
    logs = [path.name for path in (there / "runs" / "attached" / "demo" / "logs").iterdir()]
    # The refused one's presence may still be there when the next one takes its name.
    assert set(logs) <= {"producer-0.log", "producer-1.log"} and logs


async def entries_of(bus: Bus, trainer: str, number: int, process: asyncio.subprocess.Process, place: Path) -> list[LedgerEntry]:
    """The trainer's ledger, once it has so many entries."""
    async with asyncio.timeout(80):
        while len(found := await read_ledger(bus, "demo", trainer)) < number:
            assert process.returncode is None, (place / "out").read_text()[-3000:]
            await asyncio.sleep(0.2)
    return found


@pytest.mark.nats
@pytest.mark.slow
async def test_a_tap_has_the_rights_that_it_needs(tmp_path: Path) -> None:
    toml = write_run(tmp_path, steps=100_000, checkpoint_every=2)
    run = RunDir(tmp_path / "runs" / "demo")
    command = ("tap", "demo", "--name", "shadow", "--lease", "3", "--set", "trainer.optimizer.learning_rate=0.02")
    async with started(("up", str(toml)), tmp_path) as up:
        await until(lambda: trained(tmp_path) >= 2, up, tmp_path)
        assert BusAddress.load(run.bus_path_of("trainer")).user == "trainer"
        # The operator's password is out of reach, as it is on another host.
        hidden = run.bus_path.with_suffix(".hidden")
        reader = BusAddress.load(run.bus_path_of("reader"))
        run.bus_path.rename(hidden)
        bus = await connect(reader, "demo", run.load_config().bus, create=False)
        try:
            more: list[LedgerEntry] = []
            for _ in range(2):
                before = len(await read_ledger(bus, "demo", "shadow"))
                async with started(command, tmp_path) as tap:
                    more = await entries_of(bus, "shadow", before + 10, tap, tmp_path)
                    assert await bus.kv.get("positions/shadow") is not None
                    tap.send_signal(signal.SIGINT)
                    assert await asyncio.wait_for(tap.wait(), 60) == 0, (tmp_path / "out").read_text()[-3000:]
            assert [entry.version.number for entry in more] == list(range(1, len(more) + 1)), "it went on where it had left"
            assert {entry.fence for entry in more} == {1, 2}
            main = await entries_of(bus, "main", len(more), up, tmp_path)
            assert [entry.used for entry in more] == [entry.used for entry in main][: len(more)]
            assert not {entry.digest for entry in more[5:]} & {entry.digest for entry in main}
            assert {entry.fence for entry in main} == {1}
        finally:
            await bus.close()
            hidden.rename(run.bus_path)
        assert up.returncode is None
        check_nothing_was_refused(run, tmp_path)


BUS = '[bus]\nhost = "0.0.0.0"\nadvertise = "127.0.0.1"\n[gateway]\nworkers = 1\n'
PLANTED = "planted-secret-of-the-user"


def of_process(pid: int, what: str) -> bytes:
    return Path(f"/proc/{pid}/{what}").read_bytes()


def files_below(place: Path) -> set[Path]:
    return {path for path in place.rglob("*") if path.is_file()}


PAGE = "page token"


def secrets_of(run: RunDir) -> dict[str, bytes]:
    files = {role: run.role_path(role) for role in ROLES} | {"operator": run.bus_path}
    found = {role: BusAddress.load(path).password.encode() for role, path in files.items()}
    key = (run.tls / "server.key").read_bytes().splitlines()[1]
    found["gateway's key"] = run.gateway_key().encode()
    return {**found, "engine token": run.engine_token().encode(), "server key": key, PAGE: page_token(run).encode()}


async def session(run: RunDir) -> bytes:
    """The key of a session that an agent has used in every place where one may stand, and in some where none may."""
    url, key = addresses(run)["gateway-0"], run.gateway_key()
    async with aiohttp.ClientSession() as http:
        async with http.post(f"{url}/rl/start_session", headers={"Authorization": f"Bearer {key}"}) as answer:
            told = await answer.json()
        opens, call = told["api_key"], {"model": told["model"], "messages": told["messages"]}
        for path in ("v1/chat/completions", "v1/nothing", "rl/set_reward", "rl/end_session"):
            async with http.post(f"{url}/sessions/{opens}/{path}", json=call if path.startswith("v1") else {}) as answer:
                assert answer.status in (200, 400, 404)
        broken = head("/v1/chat/completions", "", f"X-Api-Key: {opens}\x01", f"Authorization: {key}\x01")
        assert status(await told_by(url, broken)) == 400
    return opens.encode()


@pytest.mark.nats
async def test_a_run_keeps_its_secrets(tmp_path: Path) -> None:
    write_run(tmp_path, steps=100_000, checkpoint_every=2, rest=BUS)
    run = RunDir(tmp_path / "runs" / "demo")
    async with started(["up", "demo.toml", "--plain"], tmp_path, surroundings={"WANDB_API_KEY": PLANTED}) as process:
        await until(lambda: trained(tmp_path) >= 2, process, tmp_path)
        await until(lambda: addresses(run), process, tmp_path)
        secrets = secrets_of(run) | {"a session's key": await session(run)}
        shown = {pid: of_process(pid, "cmdline") for pid in (process.pid, *descendants(process.pid))}
        environs = {pid: of_process(pid, "environ") for pid in shown}
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0, (tmp_path / "out").read_text()

    kinds = {pid: next((kind for kind in (*ROLES, "nats-server.conf", "up") if kind.encode() in line), "") for pid, line in shown.items()}
    assert set(kinds.values()) >= {"trainer", "engine", "feeder", "producer", "gateway", "nats-server.conf", "up"}
    told = {kinds[pid] for pid, environ in environs.items() if PLANTED.encode() in environ}
    assert told == {"up", "producer", "gateway"}, "a user's function or reward may need it, nobody else does"

    private = [run.bus_path, run.engine_token_path, run.tls / "server.key", *run.credentials.iterdir(), run.bus_store / "nats-server.conf"]
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600}
    # The server's store has every stream and the keys, as they are on the wire.
    files = files_below(tmp_path) - set(private)
    assert any("KV_demo" in str(path) for path in files)
    places = {
        **{f"arguments of {pid}": text for pid, text in shown.items()},
        **{f"environment of {pid}": text for pid, text in environs.items()},
    }
    places |= {str(path): path.read_bytes() for path in files}
    leaks = {(name, where) for name, secret in secrets.items() for where, text in places.items() if secret in text}
    assert leaks == {(PAGE, str(tmp_path / "out"))}, "the page's address is for whoever reads the terminal"
    assert len(set(secrets.values())) == len(secrets) and min(map(len, secrets.values())) >= 32
    assert json.loads(run.config_path.read_text())["bus"]["host"] == "0.0.0.0"
    assert BusAddress.load(run.bus_path).url.startswith("tls://127.0.0.1:")
    assert not any("refused" in path.read_text() or "denied" in path.read_text() for path in run.logs.iterdir())


@pytest.mark.nats
def test_a_variable_counts_as_a_secret_by_the_words_of_its_name() -> None:
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "x"}
    secret = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "token"), "s")
    assert inherited({**kept, **secret}, "trainer") == kept
    assert inherited({**kept, **secret}, "producer") == {**kept, **secret}
