"""Connections to the bus of a run."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from streamrl.bus import Bus, BusAddress, connect
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.server import NatsServer
from streamrl.config.tree import BusConfig
from streamrl.runtime.rundir import RunDir

MakeBus = Callable[..., Awaitable[Bus]]
SMALL = BusConfig(patience_s=60.0, ack_wait_s=5.0, samples_bytes=200_000_000, blobs_bytes=200_000_000)


@asynccontextmanager
async def connections(address: BusAddress, run_id: str) -> AsyncIterator[MakeBus]:
    """Connections to one run, whose streams are removed at the end."""
    opened: list[JetStreamBus] = []

    async def make(config: BusConfig = SMALL) -> Bus:
        opened.append(await connect(address, run_id, config))
        return opened[-1]

    yield make
    if opened:
        await opened[0].remove()
    for bus in opened:
        await bus.close()


@contextmanager
def serving(server: NatsServer) -> Iterator[NatsServer]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def bus_of(run: RunDir) -> AsyncIterator[Bus]:
    """Connect to the bus of a run that is down, as its store has it."""
    with serving(NatsServer(run.bus_store)) as server:
        bus = await connect(server.address, run.name, run.load_config().bus)
        yield bus
        await bus.close()
