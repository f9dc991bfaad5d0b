"""Three nats-servers in one cluster that keep three copies: a run goes on while one of them is gone, and loses nothing."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from streamrl.bus import BusAddress, connect
from streamrl.bus.accounts import accounts
from streamrl.bus.jetstream import admin
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.permissions import OPERATOR, ROLES, role_users
from streamrl.bus.server import NatsServer, find_binary
from streamrl.bus.topology import blobs_name, keys_name, sample_bucket, stream_name, streams
from streamrl.config.tree import BusConfig
from streamrl.errors import BusError
from streamrl.schemas.subjects import Subjects
from tests.support.errors import raises

pytestmark = [pytest.mark.nats, pytest.mark.process]

RUN = "run"
TO = Subjects(RUN)
SERVERS = 3


class Cluster:
    """Servers on ports of their own, with the accounts of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        ports = free_ports(2 * SERVERS)
        self._ports, self._routes = ports[:SERVERS], ports[SERVERS:]
        users = role_users(RUN, [(role, role) for role in (OPERATOR, *ROLES)])
        block = accounts(users) | {"SYS": {"users": [{"user": "sys", "password": "sys"}]}}
        routes = [f"nats-route://127.0.0.1:{port}" for port in self._routes]
        for number in range(SERVERS):
            config = {
                "server_name": f"server-{number}",
                "host": "127.0.0.1",
                "port": self._ports[number],
                "max_payload": 8 << 20,
                "jetstream": {"store_dir": str(folder / f"store-{number}")},
                "cluster": {"name": "three", "listen": f"127.0.0.1:{self._routes[number]}", "routes": routes},
                "system_account": "SYS",
                "accounts": block,
            }
            (folder / f"{number}.conf").write_text(json.dumps(config))
        self._addresses = {user.name: user for user in users}

    def address(self, role: str = OPERATOR) -> BusAddress:
        user = self._addresses[role]
        url = ",".join(f"nats://127.0.0.1:{port}" for port in self._ports)
        return BusAddress(url=url, user=user.name, password=user.password, inbox_prefix=user.inbox, api=user.api)

    def start(self, number: int) -> None:
        log = (self._folder / f"{number}.log").open("ab")
        with log:
            self._processes[number] = subprocess.Popen(
                [find_binary(), "-c", self._folder / f"{number}.conf"], stderr=log, env=dict(os.environ)
            )

    def kill(self, number: int) -> None:
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def close(self) -> None:
        for number in list(self._processes):
            self.kill(number)


def free_ports(count: int) -> list[int]:
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    for number in range(SERVERS):
        cluster.start(number)
    yield cluster
    cluster.close()


CONFIG = BusConfig(url="nats://127.0.0.1:1", replicas=3, patience_s=60.0, ack_wait_s=5.0, samples_bytes=64 << 20, blobs_bytes=64 << 20)


@pytest_asyncio.fixture
async def operator(cluster: Cluster) -> AsyncIterator[JetStreamBus]:
    deadline = time.monotonic() + 60
    while True:
        try:
            bus = await connect(cluster.address(), RUN, CONFIG)
            break
        except BusError:
            # The servers have not met yet: streams need a leader of the cluster.
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
    yield bus
    await bus.close()


Connected = Callable[[str], Awaitable[JetStreamBus]]


@pytest_asyncio.fixture
async def connected(cluster: Cluster) -> AsyncIterator[Connected]:
    """`await connected(role)`: a connection, closed whatever becomes of the test; one left open would fail the next test."""
    async with AsyncExitStack() as opened:

        async def connection(role: str) -> JetStreamBus:
            bus = await connect(cluster.address(role), RUN, CONFIG, create=False)
            opened.push_async_callback(bus.close)
            return bus

        yield connection


async def described(bus: JetStreamBus, name: str) -> dict[str, object]:
    connection = bus.connection
    return msgspec.json.decode((await connection.request(f"{connection.api}.STREAM.INFO.{name}")).data)


async def leader(bus: JetStreamBus, stream: str) -> int:
    return int(str((await described(bus, stream_name(RUN, stream)))["cluster"]["leader"]).removeprefix("server-"))  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(400)  # 41 s alone, most of it elections
async def test_a_run_goes_on_while_one_of_three_servers_is_gone(operator: JetStreamBus, cluster: Cluster, connected: Connected) -> None:
    for name in (*(stream_name(RUN, each) for each in streams(CONFIG)), keys_name(RUN), blobs_name(RUN), blobs_name(sample_bucket(RUN))):
        assert (await described(operator, name))["config"]["num_replicas"] == 3  # type: ignore[index]
    feeder, producer, trainer, reader = [await connected(role) for role in ("feeder", "producer", "trainer", "reader")]
    stop = asyncio.Event()
    tasks: list[int] = []
    samples: dict[str, int] = {}
    grants = 0
    blobs: dict[str, bytes] = {}
    seen: list[str] = []

    async def feed() -> None:
        while not stop.is_set():
            tasks.append((await feeder.publish(TO.tasks("main"), b"task", id=f"t{len(tasks)}", expect_last=len(tasks))).sequence)
            await asyncio.sleep(0.02)

    async def produce() -> None:
        while not stop.is_set():
            for lease in await producer.claim("main", max=4, wait_s=0.5):
                receipt = await producer.publish(TO.samples("main"), f"s{lease.sequence}".encode(), id=f"s{lease.sequence}")
                samples[f"s{lease.sequence}"] = receipt.sequence
                await lease.done()

    async def train() -> None:
        nonlocal grants
        revision = 0
        while not stop.is_set():
            revision = await trainer.kv.put("granted", str(grants).encode(), expect=revision)
            grants += 1
            assert (await trainer.kv.get("granted")).value == str(grants - 1).encode()  # type: ignore[union-attr]
            if grants % 10 == 0:
                blobs[f"weights/{grants}"] = os.urandom(300_000)
                await trainer.blobs.put(f"weights/{grants}", blobs[f"weights/{grants}"])
                assert await trainer.blobs.get(f"weights/{grants}") == blobs[f"weights/{grants}"]
            await asyncio.sleep(0.02)

    async def read() -> None:
        async for message in reader.read("samples", after=0):
            assert message.sequence == len(seen) + 1
            seen.append(message.body.decode())

    async def moved_on(count: int) -> None:
        wanted = [len(tasks) + count, len(samples) + count, grants + count, len(seen) + count]
        while any(now < then for now, then in zip([len(tasks), len(samples), grants, len(seen)], wanted, strict=True)):
            for each in working:
                if each.done():
                    each.result()
            await asyncio.sleep(0.05)

    working = [asyncio.ensure_future(work) for work in (feed(), produce(), train(), read())]
    try:
        await moved_on(30)
        for _ in range(2):
            gone = await leader(operator, "samples")
            cluster.kill(gone)
            await asyncio.wait_for(moved_on(30), 90)
            cluster.start(gone)
            await asyncio.wait_for(moved_on(30), 90)
            await caught_up(operator)
    finally:
        stop.set()
        await asyncio.wait(working[:3], timeout=30)
        working[3].cancel()
        await asyncio.wait(working)
    for each in working[:3]:
        each.result()
    assert tasks == list(range(1, len(tasks) + 1))
    for name, sequence in samples.items():
        assert (await operator.fetch("samples", sequence)).body == name.encode()
    assert (await operator.state("samples")).messages == len(samples)
    assert {name: await operator.blobs.get(name) for name in await operator.blobs.names()} == blobs


async def caught_up(bus: JetStreamBus) -> None:
    """Before the next is killed: two of three must know everything."""
    deadline = time.monotonic() + 60
    for name in (*(stream_name(RUN, each) for each in streams(CONFIG)), keys_name(RUN), blobs_name(RUN), blobs_name(sample_bucket(RUN))):
        while not all(each.get("current") for each in (await described(bus, name))["cluster"]["replicas"]):  # type: ignore[index]
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)


async def test_copies_are_added_to_a_run_that_has_one_and_never_taken_away(cluster: Cluster, operator: JetStreamBus) -> None:
    single = msgspec.structs.replace(CONFIG, replicas=1)
    address = cluster.address()
    bus = await connect(address, RUN, single)
    assert (await described(bus, keys_name(RUN)))["config"]["num_replicas"] == 3  # type: ignore[index]
    await bus.remove()
    again = await connect(address, RUN, single)
    await again.publish(TO.marks, b"x")
    assert (await described(again, stream_name(RUN, "samples")))["config"]["num_replicas"] == 1  # type: ignore[index]
    await admin.create(again.connection, again.topology, CONFIG)
    assert (await described(again, stream_name(RUN, "samples")))["config"]["num_replicas"] == 3  # type: ignore[index]
    assert (await again.fetch("samples", 1)).body == b"x"
    for each in (bus, again):
        await each.close()


async def test_more_copies_than_servers_are_refused_with_what_to_do(own_server: NatsServer) -> None:
    with raises(BusError) as error:
        await connect(own_server.address, RUN, CONFIG)
    assert "replicas" in str(error.value) and "bus.replicas" in error.value.hint
