"""A real run over TLS with one user a role; then its secrets are looked for everywhere they must not be."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from streamrl.bus.address import BusAddress
from streamrl.bus.permissions import ROLES
from streamrl.page.access import page_token
from streamrl.producers.gateway.worker import addresses
from streamrl.runtime.kinds import inherited
from streamrl.runtime.rundir import RunDir
from tests.support.raw_http import head, status
from tests.support.raw_http import told as told_by
from tests.support.role_server import started, trained, until, write_run

pytestmark = pytest.mark.nats

BUS = '[bus]\nhost = "0.0.0.0"\nadvertise = "127.0.0.1"\n[gateway]\nworkers = 1\n'
PLANTED = "planted-secret-of-the-user"


def descendants(pid: int) -> Iterator[int]:
    """Processes that a process has started, and theirs."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                yield int(path.name)
                yield from descendants(int(path.name))


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


def test_a_variable_counts_as_a_secret_by_the_words_of_its_name() -> None:
    kept = {"PATH": "/bin", "TOKENIZERS_PARALLELISM": "false", "KEYBOARD": "x"}
    secret = dict.fromkeys(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "token"), "s")
    assert inherited({**kept, **secret}, "trainer") == kept
    assert inherited({**kept, **secret}, "producer") == {**kept, **secret}
