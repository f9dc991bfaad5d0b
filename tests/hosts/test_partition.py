"""Trainer, engine and producer on three hosts over TLS; cables are pulled while they work."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from streamrl.bus import connect
from streamrl.bus.address import BusAddress
from streamrl.bus.server import NatsServer
from streamrl.runtime.rundir import RunDir
from tests.hosts.network import Host, hosts
from tests.support.audit.audit import audit
from tests.support.harness import read_ledger
from tests.support.needs import need
from tests.support.role_server import started, trained, until, write_run

pytestmark = [pytest.mark.nats, pytest.mark.slow]

AWAY_S = 2.0
STEPS_BETWEEN = 15
BUS = """
[weights]
also_on_bus = true
[bus]
host = "{address}"
port = 4222
ack_wait_s = 5
"""


@pytest.fixture
def network() -> Iterator[dict[str, Host]]:
    need("hosts")
    with hosts(["head", "engines", "producers"]) as made:
        yield made


def carry(head: RunDir, place: Path, role: str) -> None:
    """What a worker on another host needs, and nothing else: configuration, model, its role's credentials, the engines' token."""
    there = RunDir(place / "runs" / head.name)
    there.credentials.mkdir(parents=True)
    there.logs.mkdir()
    shutil.copy(head.config_path, there.config_path)
    shutil.copytree(head.model_dir, there.model_dir)
    shutil.copy(head.role_path(role), there.role_path(role))
    shutil.copy(head.engine_token_path, there.engine_token_path)


def log_of(place: Path, worker: str) -> str:
    return RunDir(place / "runs" / "demo").log_path(worker).read_text()


@asynccontextmanager
async def remote(host: Host, head: RunDir, place: Path, role: str, *, num: int = 1) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """Workers of one role on a host of their own."""
    carry(head, place, role)
    async with AsyncExitStack() as stack:
        command = ["worker", role, "--run", "demo", "--index"]
        yield [await stack.enter_async_context(started([*command, str(n)], place, prefix=host.prefix)) for n in range(num)]


async def progress(head: RunDir, up: asyncio.subprocess.Process) -> None:
    """Wait until some more batches have been trained and are in a checkpoint."""
    place = head.path.parents[1]
    before = trained(place)
    await until(lambda: trained(place) >= before + STEPS_BETWEEN, up, place)


async def test_a_run_over_three_hosts_outlives_cut_cables(tmp_path: Path, network: dict[str, Host]) -> None:
    head_place, engines_place, producers_place = (tmp_path / name for name in network)
    head_place.mkdir()
    head = RunDir(head_place / "runs" / "demo")
    write_run(
        head_place,
        steps=1_000_000,
        engine='host = "0.0.0.0"\nworkers = 0\nslots = 16',
        producer="workers = 0",
        rest=BUS.format(address=network["head"].address),
    )
    async with started(["up", "demo.toml", "--json"], head_place, prefix=network["head"].prefix) as up:
        await until(head.role_path("producer").exists, up, head_place)
        await until(head.config_path.exists, up, head_place)
        async with (
            remote(network["engines"], head, engines_place, "engine", num=2) as engines,
            remote(network["producers"], head, producers_place, "producer") as [producer],
        ):
            await progress(head, up)
            for cut in (["head"], ["engines", "producers"]):
                for name in cut:
                    network[name].unplug()
                await asyncio.sleep(AWAY_S)
                for name in cut:
                    network[name].plug_in()
                await progress(head, up)
            assert [process.returncode for process in (*engines, producer)] == [None] * 3, "no worker had to be started again"
            up.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(up.wait(), 60) == 0, (head_place / "out").read_text()

    server = NatsServer(head.bus_store)
    server.start()
    try:
        address = server.address
        report = await audit(address.url, address.user, address.password, "demo")
        bus = await connect(address, "demo", head.load_config().bus)
        entries = await read_ledger(bus, "demo")
        await bus.close()
    finally:
        server.stop()
    assert report.ok, report.problems
    assert len(entries) >= 3 * STEPS_BETWEEN
    assert BusAddress.load(head.bus_path).url == f"tls://{network['head'].address}:4222"
    for index in range(2):
        said = log_of(engines_place, f"engine-{index}")
        assert "transport=bus" in said and "transport=shm" not in said
    said = log_of(producers_place, "producer-0")
    assert f"address=http://{network['engines'].address}:" in said and said.count("event=engine_found") >= 2
