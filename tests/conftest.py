"""Fixtures for everything that needs a bus.

`bus` runs a test twice, on the in-process bus and on a real nats-server; `nats_bus` only on the latter. `make_bus` and `make_nats_bus`
take a BusConfig. The server is shared by the session, each test has a run id of its own.
"""

from __future__ import annotations

import os

# Before torch and numpy are loaded, here and in every process that a test starts: with a thread a core each, processes that run beside
# each other spin for the cores that the others have, which takes six times the processor time for models as small as these.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import gc
import logging
import re
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from hypothesis import HealthCheck, settings

from streamrl.bus import Bus, BusAddress
from streamrl.bus.memory import MemoryBus
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from tests.support.buses import SMALL, MakeBus, connections
from tests.support.guard import mark, starts_no_process_unmarked
from tests.support.leftovers import Leftovers
from tests.support.needs import need, required
from tests.support.preloaded import PRELOADED, Preloaded
from tests.support.programs import Start, programs
from tests.support.shared import shared
from tests.support.world.nursery import Nursery, nursery

__all__ = ["starts_no_process_unmarked"]
# A busy machine decides no test: Hypothesis would fail an example that takes 200 ms, or a strategy that is slow to draw.
settings.register_profile("streamrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("streamrl")


# Importing all test files makes 700,000 objects that stay: they are looked through neither meanwhile nor with each collection of a test.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """The process that leads the session looks at what all of them leave behind."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Leftovers(), "leftovers")


def pytest_sessionstart() -> None:
    """A need that is required and not known is said before anything runs."""
    required()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests before `-m` chooses, and put the files that start processes first: they wait, and quick ones fill the time beside them."""
    for item in items:
        mark(item)
    waits = {item.path for item in items if item.get_closest_marker("process") is not None}
    items.sort(key=lambda item: item.path not in waits)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000)  # the default of 700 costs 5 % of the quick tests
    gc.enable()
    atexit.register(gc.unfreeze)  # else extension modules report what they think has leaked


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What a machine lacks is found before a test's fixtures are made; `gpu` is a need with a marker of its own."""
    if item.get_closest_marker("gpu") is not None:
        need("gpu")
    for marker in item.iter_markers("needs"):
        need(*marker.args)


@pytest.fixture(autouse=True)
def shared_memory_is_freed() -> Iterator[None]:
    """After all other fixtures. Only tests that prepare runs have imported the module."""
    yield
    if memory := sys.modules.get("tests.support.memory"):
        memory.free()


@pytest.fixture(autouse=True)
def log_is_restored() -> Iterator[None]:
    """Undo what a command that runs in the test's process does to its log."""
    root = logging.getLogger()
    level, before = root.level, [*root.handlers]
    yield
    if root.handlers != before:
        logging.captureWarnings(False)
        for handler in root.handlers:
            if handler not in before:
                handler.close()
        root.handlers[:], root.level = before, level


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A real nats-server for the session; do not stop it (start one of your own for that)."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    with shared():
        server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def nats_address(nats_server: NatsServer) -> BusAddress:
    return nats_server.address


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A started nats-server that the test may kill and start again."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest_asyncio.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    """`await start(*words)`: a Python program in `tmp_path`; none outlives the test."""
    async with programs(tmp_path) as found:
        yield found


@pytest_asyncio.fixture
async def children(tmp_path: Path) -> AsyncIterator[Nursery]:
    """The process that services are forked from."""
    async with nursery(tmp_path / "children.log") as found:
        yield found


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded]:
    """Starts programs that need not import torch; it costs nothing before its first one."""
    yield PRELOADED
    PRELOADED.close()


@pytest.fixture
def run_id(request: pytest.FixtureRequest) -> str:
    name = re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:40].strip("-")
    return f"{name}-{uuid.uuid4().hex[:8]}"


@pytest_asyncio.fixture
async def make_nats_bus(nats_address: BusAddress, run_id: str) -> AsyncIterator[MakeBus]:
    """`await make_nats_bus(config)`: a new connection to the test's run."""
    async with connections(nats_address, run_id) as make:
        yield make


@pytest_asyncio.fixture(params=["memory", pytest.param("nats", marks=pytest.mark.nats)])
async def make_bus(request: pytest.FixtureRequest, run_id: str) -> AsyncIterator[MakeBus]:
    """Like `make_nats_bus`, on both adapters; in process, later calls give the bus of the first."""
    if request.param == "nats":
        async with connections(request.getfixturevalue("nats_address"), run_id) as make_nats:
            yield make_nats
        return
    made: list[MemoryBus] = []

    async def make(config: BusConfig = SMALL) -> Bus:
        if not made:
            made.append(MemoryBus(run_id, config))
        return made[0]

    yield make
    for bus in made:
        await bus.close()


@pytest_asyncio.fixture
async def bus(make_bus: MakeBus) -> Bus:
    return await make_bus()


@pytest_asyncio.fixture
async def nats_bus(make_nats_bus: MakeBus) -> Bus:
    return await make_nats_bus()
