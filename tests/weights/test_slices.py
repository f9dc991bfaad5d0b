"""Rank 0 publishes with the other ranks: what is asked for and kept, and a rank that is late, fails or dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.bus.server import NatsServer
from streamrl.config.tree import WeightsConfig
from streamrl.errors import WeightSyncError
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.bus import BusTransport
from streamrl.weights.factory import make_publisher, make_rank_publisher, make_transports
from streamrl.weights.manifest import Content, offers
from streamrl.weights.protocol import Shard
from streamrl.weights.publisher import Publisher
from streamrl.weights.ranks import check_places
from streamrl.weights.shm import ShmTransport
from streamrl.weights.slices import MergedTransport, OtherRanks, RankPublisher, Requests
from tests.support.errors import raises
from tests.support.processes import until
from tests.support.wanted import fetched, host
from tests.weights.ranked import large, model, rows_of
from tests.weights.test_ranks import whole

SUBJECTS = Subjects("r")
PATIENCE_S = 60.0


def v(number: int) -> Version:
    return Version(0, number)


class Ranks:
    """Rank 0 and others in this process: each has a publisher, and orders reach all of them at once."""

    def __init__(self, bus: Bus, run_dir: Path, config: WeightsConfig, *, others: int = 1, patience_s: float = PATIENCE_S) -> None:
        loop = asyncio.get_running_loop()
        self.asked = OtherRanks(others, self._order, patience_s)
        self.others = [
            make_rank_publisher(config, bus=bus, subjects=SUBJECTS, policy="policy", run_dir=run_dir, loop=loop, rank=rank)
            for rank in range(1, others + 1)
        ]
        self.leader: Publisher = make_publisher(
            config, bus=bus, subjects=SUBJECTS, policy="policy", run_dir=run_dir, loop=loop, others=self.asked
        )

    def _order(self, word: str, version: Version, kept: Sequence[Version]) -> None:
        for rank, other in enumerate(self.others, 1):
            other.offer(word, version, kept, self.part_of(version.number, rank))

    def part_of(self, number: int, rank: int) -> list[Shard]:
        """What a rank has of a version."""
        return rows_of(model(number), rank, len(self.others) + 1)

    async def offer(self, number: int) -> None:
        await asyncio.to_thread(
            self.leader.offer, v(number), Content(model(number)).digest, rows_of(model(number), 0, len(self.others) + 1)
        )

    async def close(self) -> None:
        await asyncio.to_thread(self.leader.close, 60.0)
        for other in self.others:
            await asyncio.to_thread(other.close)


async def announced(bus: Bus) -> Manifest:
    last = await bus.last(SUBJECTS.weights("policy"))
    assert last is not None
    return decode(last.body, Manifest)


async def read(bus: Bus, run_dir: Path, config: WeightsConfig, manifest: Manifest) -> bytes:
    transport = make_transports(config, bus=bus, run="r", policy="policy", run_dir=run_dir)[manifest.transport]
    return (await fetched(transport, manifest)).tobytes()


def stored(folder: Path, of: str = "") -> list[str]:
    """Names of complete files, of all ranks or of one."""
    return sorted(path.name for path in folder.glob(f"*{of}.weights"))


@pytest.fixture
def config() -> WeightsConfig:
    # Kept for ever: then the files lie in the run's folder.
    return WeightsConfig(transport="shm", keep=0, also_on_bus=True, anchor_every=4)


@pytest.mark.parametrize("others", [1, 2])
async def test_what_ranks_publish_together_is_the_version(tmp_path: Path, config: WeightsConfig, others: int) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config, others=others)
    for number in range(1, 7):
        await ranks.offer(number)
    await ranks.close()
    manifest = await announced(bus)
    assert (manifest.version, manifest.digest, manifest.transport) == (v(6), Content(model(6)).digest, "shm")
    assert len({part.location for part in manifest.parts}) == others + 1
    for found in offers(manifest):
        assert await read(bus, tmp_path, config, found) == whole(6)
    assert [link.parent for link in manifest.links["bus"]] == [None, v(1), v(2), v(3), None, v(4), v(5)]


class Held(ShmTransport):
    """A transport whose contributions wait until they are let go."""

    go: asyncio.Event
    moved: Callable[[], None] | None = None

    async def contribute(self, version, shards, *, moved=None):
        self.moved = moved
        await self.go.wait()
        return await super().contribute(version, shards)


async def test_ranks_keep_what_rank_0_may_still_ask_for_and_nothing_else(tmp_path: Path) -> None:
    """While version 1 is being stored, 2 and 3 are replaced by those after them: no rank keeps them, and none stores them."""
    bus = MemoryBus("r")
    own, other = (Held(run="r", policy="policy", directory=tmp_path, rank=rank) for rank in range(2))
    own.go = other.go = asyncio.Event()
    publisher = RankPublisher(bus.kv, "policy", {"shm": other}, rank=1, loop=asyncio.get_running_loop())
    asked: list[tuple[Version, tuple[Version, ...]]] = []

    def order(word: str, version: Version, kept: Sequence[Version]) -> None:
        asked.append((version, tuple(kept)))
        publisher.offer(word, version, kept, rows_of(model(version.number), 1, 2))

    ranks = OtherRanks(1, order, PATIENCE_S)
    merged = MergedTransport("shm", own, Requests(bus.kv, "policy", ranks))
    leader = Publisher(bus, SUBJECTS, merged, policy="policy", loop=asyncio.get_running_loop(), offered=ranks.offer)
    for number in range(1, 5):
        await asyncio.to_thread(leader.offer, v(number), Content(model(number)).digest, rows_of(model(number), 0, 2))
        while number == 1 and await bus.kv.get("ranks/wanted-policy") is None:
            await asyncio.sleep(0.01)
    own.go.set()
    await asyncio.to_thread(leader.close, 60.0)
    assert asked == [(v(1), ()), (v(2), (v(1),)), (v(3), (v(1),)), (v(4), (v(1),))]
    assert [name.split(".")[1] for name in stored(tmp_path, ".r1")] == ["0-1", "0-4"]
    assert not publisher._kept
    publisher.close()
    own.close()
    other.close()


async def test_a_rank_whose_bytes_go_is_waited_for_beyond_the_patience(tmp_path: Path, config: WeightsConfig) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config, patience_s=0.6)
    late = Held(run="r", policy="policy", directory=tmp_path / "weights", rank=1)
    late.go = asyncio.Event()
    ranks.others[0].transports["shm"] = late  # type: ignore[index]
    await ranks.offer(1)
    await until(lambda: late.moved is not None)
    assert late.moved is not None
    for _ in range(12):  # 1.2 s
        late.moved()
        await asyncio.sleep(0.1)
    assert await bus.last(SUBJECTS.weights("policy")) is None
    late.go.set()
    await ranks.close()
    assert (await announced(bus)).digest == Content(model(1)).digest
    late.close()


async def test_rank_0_uploads_while_the_others_do(tmp_path: Path, config: WeightsConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each transport is answered for by itself: rank 0 does not wait for the others' upload before its own."""
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config)
    slow = ranks.others[0].transports["bus"]
    go, contribute, signs = asyncio.Event(), slow.contribute, list[bool]()

    async def held(version, shards, *, moved):
        await go.wait()
        return await contribute(version, shards, moved=lambda: signs.append(True) or moved())

    monkeypatch.setattr(slow, "contribute", held)
    await ranks.offer(1)
    while not await bus.blobs.names():
        await asyncio.sleep(0.01)
    assert await bus.last(SUBJECTS.weights("policy")) is None
    go.set()
    await ranks.close()
    assert (await announced(bus)).digest == Content(model(1)).digest
    assert signs  # each blob is one


async def test_a_version_whose_bytes_are_gone_is_stored_again_by_all(tmp_path: Path, config: WeightsConfig) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config)
    await ranks.offer(1)
    while await bus.last(SUBJECTS.weights("policy")) is None:
        await asyncio.sleep(0.01)
    first = await announced(bus)
    for path in (tmp_path / "weights").glob("*.weights"):
        path.unlink()
    for name in await bus.blobs.names():
        await bus.blobs.delete(name)
    await ranks.offer(1)
    await ranks.close()
    again = await announced(bus)
    assert not {part.location for part in first.parts} & {part.location for part in again.parts}
    for found in offers(again):
        assert await read(bus, tmp_path, config, found) == whole(1)


async def test_a_rank_that_does_not_store_is_named(tmp_path: Path, config: WeightsConfig) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config, patience_s=0.2)
    late = Held(run="r", policy="policy", directory=tmp_path / "weights", rank=1)
    late.go = asyncio.Event()
    ranks.others[0].transports["shm"] = late  # type: ignore[index]
    await ranks.offer(1)
    with raises(WeightSyncError, rank=1, version="0.1") as caught:
        await asyncio.to_thread(ranks.leader.close, 60.0)
    assert "logs/trainer-1.log" in caught.value.hint
    assert await bus.last(SUBJECTS.weights("policy")) is None
    ranks.others[0].close()


async def test_a_rank_that_cannot_store_says_why_to_all(tmp_path: Path, config: WeightsConfig) -> None:
    bus = MemoryBus("r")
    ranks = Ranks(bus, tmp_path, config)
    columns = msgspec.structs.replace(model(1)[0], shape=(301, 4), offset=(0, 4), data=np.zeros(301 * 8, np.uint8))
    ranks.part_of = lambda number, rank: [columns]
    await ranks.offer(1)
    with raises(WeightSyncError, rank=1) as caught:
        await asyncio.to_thread(ranks.leader.close, 60.0)
    assert "'embed': expected a range" in caught.value.message
    for call in (lambda: ranks.others[0].offer(ranks.asked.word, v(2), (), []), ranks.others[0].close):
        with pytest.raises(WeightSyncError, match="a range of rows"):
            call()


async def test_what_was_asked_of_ranks_before_is_not_answered(tmp_path: Path, config: WeightsConfig) -> None:
    """The keys of a meeting that has ended lie there still: its request is not done again, nor its answer taken."""
    bus = MemoryBus("r")
    config = msgspec.structs.replace(config, also_on_bus=False)
    ranks = Ranks(bus, tmp_path, config)
    await ranks.offer(1)
    await ranks.close()
    before = await bus.kv.get("ranks/stored-policy-1-shm")
    files = stored(tmp_path / "weights")
    again = Ranks(bus, tmp_path, config)
    again.others[0].offer(again.asked.word, v(1), (), rows_of(model(1), 1, 2))
    await again.offer(2)
    await again.close()
    after = await bus.kv.get("ranks/stored-policy-1-shm")
    assert before is not None and after is not None and after.revision == before.revision + 2  # the request lies between
    assert len(stored(tmp_path / "weights")) == len(files) + 2
    assert (await announced(bus)).digest == Content(model(2)).digest


async def test_damaged_keys_are_passed_over(tmp_path: Path, config: WeightsConfig) -> None:
    """Else ranks that are started again would read them again, and end again."""
    bus = MemoryBus("r")
    for key in ("ranks/wanted-policy", "ranks/stored-policy-1-shm"):
        await bus.kv.put(key, b"\xc1 no message")
    ranks = Ranks(bus, tmp_path, config)
    await ranks.offer(1)
    await ranks.close()
    assert (await announced(bus)).digest == Content(model(1)).digest


RANK = """
import asyncio, sys
from pathlib import Path
from streamrl.bus import BusAddress, connect
from streamrl.schemas.versions import Version
from streamrl.weights.bus import BusTransport
from streamrl.weights.slices import RankPublisher
from tests.weights.ranked import large, rows_of

async def main():
    bus = await connect(BusAddress.load(Path(sys.argv[1]) / "bus.json"), "r", create=False)
    transport = BusTransport(bus.blobs, run="r", policy="policy", part_bytes=4096)
    publisher = RankPublisher(bus.kv, "policy", {"bus": transport}, rank=1, loop=asyncio.get_running_loop())
    publisher.offer(sys.argv[2], Version(0, 1), (), rows_of(large(), 1, 2))
    print("offered", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await bus.close()

asyncio.run(main())
"""


def both_ranks(bus: Bus, tmp_path: Path, word: str, patience_s: float) -> tuple[subprocess.Popen[str], BusTransport, Publisher]:
    """Rank 1 as a process, which has taken its slices of version 1; rank 0 here, and its publisher."""
    command = [sys.executable, "-c", RANK, str(tmp_path), word]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "offered\n"
    own = BusTransport(bus.blobs, run="r", policy="policy", part_bytes=1 << 20)
    requests = Requests(bus.kv, "policy", OtherRanks(1, lambda word, version, kept: None, patience_s, word))
    merged = MergedTransport("bus", own, requests)
    return process, own, Publisher(bus, SUBJECTS, merged, policy="policy", loop=asyncio.get_running_loop())


@pytest.mark.nats
@pytest.mark.process
async def test_a_rank_that_is_killed_while_it_stores_leaves_no_version_and_its_successor_makes_it(
    own_server: NatsServer, nats_bus: Bus, tmp_path: Path
) -> None:
    own_server.address.save(tmp_path / "bus.json")
    digest = Content(large()).digest
    process, own, leader = both_ranks(nats_bus, tmp_path, "first", 2.0)
    await asyncio.to_thread(leader.offer, v(1), digest, rows_of(large(), 0, 2))
    while len(await nats_bus.blobs.names()) < 20:  # one is rank 0's; rank 1 stores 256
        await asyncio.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = set(await nats_bus.blobs.names())
    assert len(left) < 200
    with raises(WeightSyncError, rank=1):
        await asyncio.to_thread(leader.close, 60.0)
    assert await nats_bus.last(SUBJECTS.weights("policy")) is None
    own.close()
    # All ranks are started again.
    process, own, leader = both_ranks(nats_bus, tmp_path, "second", PATIENCE_S)
    await asyncio.to_thread(leader.offer, v(1), digest, rows_of(large(), 0, 2))
    await asyncio.to_thread(leader.close, 60.0)
    process.communicate(timeout=60)
    manifest = await announced(nats_bus)
    assert manifest.digest == digest and not left & {part.location for part in manifest.parts}
    assert (await fetched(own, manifest)).tobytes() == host(large()[0]).tobytes()
    await own.retire(v(2))
    assert await nats_bus.blobs.names() == []  # those of the dead rank too
    own.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p[:-1], "expected a piece with byte .*, of tensor 'w.up', got none"),
        (lambda p: p[1:], "expected a piece with byte 0, of tensor 'embed', got none"),
        (lambda p: [p[0], msgspec.structs.replace(p[1], nbytes=p[1].nbytes - 2), *p[2:]], "expected a piece with byte .*, got none"),
        (lambda p: [p[0], msgspec.structs.replace(p[1], start=p[1].start - 2), *p[2:]], "expected pieces apart|expected a piece with"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], start=p[0].start)], "expected pieces apart from each other"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], start=1 << 40)], "expected pieces apart from each other within its"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], start=-2)], "expected pieces apart from each other within its"),
        (lambda p: [*p[:-1], msgspec.structs.replace(p[-1], stored=1 << 40)], "expected pieces in order within its"),
        (lambda p: [p[0], msgspec.structs.replace(p[1], stored=p[0].stored), *p[2:]], "expected pieces in order within its"),
        (lambda p: [msgspec.structs.replace(p[0], nbytes=0), *p[1:]], "expected pieces in order within its"),
    ],
)
async def test_places_that_are_no_version_are_refused_by_every_transport(tmp_path: Path, change, said: str) -> None:
    bus = MemoryBus("r")
    for config in (WeightsConfig(transport="shm", keep=0), WeightsConfig(transport="bus", keep=0, anchor_every=1)):
        ranks = Ranks(bus, tmp_path, config)
        await ranks.offer(1)
        await ranks.close()
        good = await announced(bus)
        check_places(good)
        pieces = tuple(change(list(good.pieces)))
        links = {name: tuple(msgspec.structs.replace(link, pieces=pieces) for link in links) for name, links in good.links.items()}
        bad = msgspec.structs.replace(good, pieces=pieces, links=links)
        assert await read(bus, tmp_path, config, good) == whole(1)
        with pytest.raises(WeightSyncError, match=rf"manifest of policy 0\.1: ({said})"):
            await read(bus, tmp_path, config, bad)
