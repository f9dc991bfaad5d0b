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

import pytest

from streamrl.bus import BusAddress, connect
from streamrl.bus.permissions import OPERATOR, ROLES
from streamrl.bus.server import find_binary
from streamrl.cli import main
from streamrl.config.load import load
from streamrl.config.tree import BusConfig, Config
from streamrl.doctor.accounts import variable
from streamrl.doctor.run_checks import check_logins
from streamrl.errors import ConfigError, Forbidden
from streamrl.monitor.status import ONE_LOGIN, RunStatus, describe, print_status
from streamrl.runtime.credentials import logins, write_cluster
from streamrl.runtime.rundir import RunDir
from tests.security.conftest import client_of, wire_of
from tests.support.needs import need
from tests.support.role_server import started, trained, until, write_run

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
    said = (tmp_path / "out").read_text() + "".join(path.read_text() for path in run.logs.glob("*.log"))
    assert "orbidden" not in said and "lacks this right" not in said and "ermissions" not in said
    await reader.close()
    await operator.close()


def cluster(tmp_path: Path, user: str, password: str) -> BusConfig:
    return BusConfig(url="tls://cluster:4222", user=user, password_file=str(tmp_path / password))


def test_one_login_is_written_once_and_said_to_separate_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
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
