from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.bus.bus_thread import BusThread
from streamrl.bus import BusAddress, connect
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.errors import BusUnavailable, LogTruncated
from streamrl.schemas.subjects import Subjects

pytestmark = pytest.mark.nats


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "bus")
    server.start()
    yield server
    server.stop()


def test_a_thread_without_a_loop_publishes_and_reads(own_server: NatsServer) -> None:
    marks = Subjects("run").marks
    with BusThread(lambda: connect(own_server.address, "run", BusConfig(patience_s=10))) as bus:
        under_way = [bus.submit(lambda bus, index=index: bus.publish(marks, b"%d" % index)) for index in range(100)]
        assert [future.result().sequence for future in under_way] == list(range(1, 101))
        read = bus.iterate(lambda bus: bus.read("samples", after=90))
        assert [message.sequence for message in itertools.islice(read, 10)] == list(range(91, 101))
        del read
        bus.run(lambda bus: bus.trim("samples", through=50))
        with pytest.raises(LogTruncated):
            next(bus.iterate(lambda bus: bus.read("samples", after=3)))


def test_the_bus_works_on_while_its_caller_computes(own_server: NatsServer) -> None:
    with BusThread(lambda: connect(own_server.address, "run", BusConfig(patience_s=10))) as bus:
        future = bus.submit(lambda bus: bus.publish(Subjects("run").marks, b"x"))
        deadline = time.monotonic() + 10
        while not future.done() and time.monotonic() < deadline:
            sum(range(1000))
        assert future.result(timeout=0).sequence == 1


def test_a_bus_that_cannot_be_reached_raises_on_entry() -> None:
    address = BusAddress(url="nats://127.0.0.1:1")
    with pytest.raises(BusUnavailable), BusThread(lambda: connect(address, "run", patience_s=0.2)):
        pass
