"""Experts that samples keep beside them: stored first, checked before a batch closes, and where they are gone the stream is told."""

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.dead_letters import publish_blob_missing
from streamrl.consumers.training.reader import RecordReader
from streamrl.consumers.training.sample_blobs import Replayed, SampleBlobs
from streamrl.consumers.training.stream_fold import StreamFold
from streamrl.core.assembly import used
from streamrl.core.batches import TrainBatch
from streamrl.core.fold import BLOB_MISSING
from streamrl.core.state import FoldConfig, initial_state
from streamrl.engines.experts import Routing
from streamrl.errors import Forbidden, SchemaError
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.publishing import Publisher
from streamrl.producers.routing import store_experts
from streamrl.schemas.codec import encode
from streamrl.schemas.experts import RoutedExperts, compact
from streamrl.schemas.ledger import Drop
from streamrl.schemas.samples import BlobRef, Sample, VersionSpan
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.tiny import ledger_entry

ROUTING = Routing(layers=3, per_token=2, experts=8)
RULES = FoldConfig(batch_tasks=1, group_size=2, max_staleness=1, drop_zero_variance=False)
Experts = npt.NDArray[np.unsignedinteger]


def task(index: int = 0, run: str = "r") -> RolloutTask:
    return RolloutTask(run=run, source="main", index=index, prompt_ids=(5, 6, 7), num_rollouts=2, seed=index)


def routing(tokens: int, seed: int = 0) -> Experts:
    return np.random.default_rng(seed).integers(0, 8, (tokens, 3, 2)).astype(np.uint8)


def turn(ids: list[int], experts: Experts | None) -> Segment:
    found = None if experts is None else compact(experts, 8)
    return Segment(tuple(ids), (-0.5,) * len(ids), (VersionSpan(len(ids), Version()),), experts=found)


def episode(rollout: int, answer: list[int], experts: Experts | None) -> Episode:
    segments = (Segment((5, 6, 7)), turn(answer, experts))
    return Episode(segments=segments, finish_reason="stop", turns=("x",), rollout=rollout, reward=float(rollout))


class World:
    """A producer's side and a trainer's side of one stream."""

    images = False
    sampling = Sampling()
    store = staticmethod(store_experts)
    replayed = Replayed(ROUTING)

    def __init__(self, bus: Bus, run: str) -> None:
        self.bus = bus
        self.subjects = Subjects(run)
        self.publisher = Publisher(bus, self.subjects)
        self.run = run

    async def publish(self, episodes: list[Episode], change: Callable[[Sample], Sample] = lambda sample: sample, index: int = 0) -> None:
        asked = replace(task(index, self.run), sampling=self.sampling)
        samples = await self.store(self.publisher, samples_of(asked, episodes, producer="p"), episodes)
        await self.publisher.task(asked, [change(sample) for sample in samples], [])

    async def lose(self) -> dict[str, bytes]:
        """Delete all blobs; returns them."""
        blobs = self.bus.sample_blobs
        bodies = {name: await blobs.get(name) for name in await blobs.names()}
        for name in bodies:
            await blobs.delete(name)
        return bodies

    def fold(self, call: Caller) -> tuple[StreamFold, RecordReader]:
        reader = RecordReader(self.bus, call.loop, after=0, capacity=16)
        looks = self.replayed.anything or self.images
        blobs = SampleBlobs(self.bus.sample_blobs, call.loop, self.replayed, ahead=4, images=self.images) if looks else None
        made = StreamFold(
            reader=reader,
            config=RULES,
            state=initial_state(RULES),
            messages={},
            blobs=blobs,
            lost=lambda group, rollout, why: call(publish_blob_missing(self.bus, self.subjects, group, rollout, why)),
        )
        return made, reader

    async def batch(self) -> tuple[TrainBatch, StreamFold]:
        call = Caller(asyncio.get_running_loop())
        fold, reader = self.fold(call)

        def work() -> TrainBatch:
            closed = fold.next(None, lambda: False)
            assert closed is not None
            return fold.assemble(closed)

        try:
            return await asyncio.wait_for(asyncio.to_thread(work), 30), fold
        finally:
            reader.close()

    async def dropped(self) -> tuple[TrainBatch, Drop]:
        """The batch, which has rollout 1 alone, and why rollout 0 is not in it."""
        batch, fold = await self.batch()
        assert batch.rollouts.tolist() == [1]
        [drop] = fold.own.drops
        assert (drop.reason, drop.rollouts) == (BLOB_MISSING, (0,))
        return batch, drop


def two() -> list[Episode]:
    return [episode(0, [1, 2], routing(4)), episode(1, [3], routing(3))]


@pytest.fixture
def world() -> World:
    return World(MemoryBus("r"), "r")


async def test_they_reach_the_batch_token_by_token(bus: Bus, run_id: str) -> None:
    world = World(bus, run_id)
    found = [routing(5, 1), routing(4, 2)]
    await world.publish([episode(0, [1, 2, 3], found[0]), episode(1, [4, 8], found[1])])
    assert len(await world.bus.sample_blobs.names()) == 2
    batch, _ = await world.batch()
    assert batch.routed_experts is not None and batch.offsets.tolist() == [0, 6, 11]
    assert (batch.routed_experts[:5] == found[0]).all() and (batch.routed_experts[6:10] == found[1]).all()
    assert (batch.routed_experts[[5, 10]] == -1).all(), "nobody computes what follows the last token"


async def test_several_samples_of_a_rollout_share_a_blob_and_without_any_the_batch_says_nothing(world: World) -> None:
    await world.publish([episode(0, [1], None), episode(1, [2], None)])
    batch, _ = await world.batch()
    assert batch.routed_experts is None and not await world.bus.sample_blobs.names()
    world, found = World(MemoryBus("r"), "r"), [routing(4, 1), routing(6, 2)]
    await world.publish([episode(0, [1, 2], found[0]), episode(0, [1, 2, 3, 4], found[1]), episode(1, [4], routing(3, 3))])
    assert len(await world.bus.sample_blobs.names()) == 2
    batch, _ = await world.batch()
    assert batch.routed_experts is not None and batch.offsets.tolist() == [0, 5, 12, 16]
    assert (batch.routed_experts[:4] == found[0]).all() and (batch.routed_experts[5:11] == found[1]).all()


async def test_of_several_turns_each_token_is_of_the_call_that_computed_it(world: World) -> None:
    first, second = routing(4, 1), routing(8, 2)
    chat = Episode(
        segments=(Segment((5, 6, 7)), turn([1, 2], first), Segment((9, 9)), turn([3, 4], second), Segment((9,))),
        finish_reason="stop",
        turns=("x", "y"),
        reward=1.0,
    )
    await world.publish([chat, episode(1, [4], None)])
    batch, _ = await world.batch()
    assert batch.routed_experts is not None
    assert (batch.routed_experts[:4] == first).all() and (batch.routed_experts[4:8] == second[4:]).all()
    assert (batch.routed_experts[8:] == -1).all(), "the end of the chat, and a rollout whose engine said nothing"


REFS: list[dict[str, Any]] = [
    {"name": "../../etc/passwd"},
    {"name": "0/0.ffffffff"},
    {"sha256": "ab" * 32},
    {"num_rows": 1 << 40},
    {"start_row": 1 << 40, "num_rows": 1},
]


@pytest.mark.parametrize("wrong", REFS, ids=str)
async def test_a_sample_that_names_what_is_not_there_ends_its_rollout(world: World, wrong: dict[str, Any]) -> None:
    def change(sample: Sample) -> Sample:
        assert sample.routed_experts is not None
        return replace(sample, routed_experts=replace(sample.routed_experts, **wrong)) if sample.rollout == 0 else sample

    await world.publish(two(), change)
    batch, drop = await world.dropped()
    assert batch.routed_experts is not None and drop.detail.startswith("routed experts of sample 0: ")


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "noise": bytes(range(256)),
    "other layers": encode(compact(routing(4)[:, :2], 8)),
    "other experts a token": encode(compact(routing(4)[..., :1], 8)),
    "experts that there are not": encode(compact(routing(4) + 7, 256)),
    "too few bytes": encode(RoutedExperts("uint8", (4, 3, 2), bytes(23))),
    "more rows than bytes": encode(RoutedExperts("uint8", (1 << 40, 3, 2), bytes(24))),
    "fewer than no rows": encode(RoutedExperts("uint8", (-4, -3, 2), bytes(24))),
    "another type": encode(RoutedExperts("float64", (1, 3, 1), bytes(24))),
    "objects": encode(RoutedExperts("O", (1, 3, 1), bytes(24))),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
async def test_a_blob_that_holds_something_else_ends_its_rollout(world: World, body: bytes) -> None:
    await world.bus.sample_blobs.put("0/0.00000000", body)
    ref = BlobRef("0/0.00000000", hashlib.sha256(body).hexdigest(), 0, 4)
    await world.publish(two(), lambda sample: replace(sample, routed_experts=ref) if sample.rollout == 0 else sample)
    await world.dropped()


async def test_what_is_gone_ends_its_rollouts_and_is_decided_alike_when_it_is_back(world: World) -> None:
    """By the record on the stream, not by what there is now; and the next group is trained."""
    await world.publish(two())
    bodies = await world.lose()
    await world.publish(two(), index=1)
    batch, fold = await world.batch()
    assert batch.tasks.tolist() == [1, 1] and fold.own.is_retired(0)
    # A second trainer, which finds the same, tells nothing twice.
    last = (await world.bus.state("samples")).last
    for back in (False, True):
        for name, body in bodies.items() if back else ():
            await world.bus.sample_blobs.put(name, body)
        again, _ = await world.batch()
        assert (await world.bus.state("samples")).last == last and again.tasks.tolist() == [1, 1]


async def test_a_batch_that_was_trained_before_says_what_it_lacks(world: World) -> None:
    await world.publish(two())
    call = Caller(asyncio.get_running_loop())
    fold, reader = world.fold(call)
    try:
        closed = await asyncio.to_thread(fold.next, None, lambda: False)
        assert closed is not None
        other, second = world.fold(call)
        await world.lose()
        past: Any = replace(ledger_entry("r", 1), cursor=1, used=used(closed))
        again = await asyncio.to_thread(other.next, past, lambda: False)
        assert again is not None
        with pytest.raises(SchemaError, match=r"version 1 .* rollout 0 of task 0"):
            await asyncio.to_thread(other.assemble, again)
        second.close()
    finally:
        reader.close()


class Barred:
    """Stands for a login of before there were such blobs."""

    async def get(self, name: str) -> bytes:
        raise Forbidden(f"may not read {name}", hint="grant it")


async def test_a_login_that_may_not_read_them_ends_the_trainer_and_no_rollout(world: World) -> None:
    await world.publish(two())
    last = (await world.bus.state("samples")).last
    call = Caller(asyncio.get_running_loop())
    reader = RecordReader(world.bus, call.loop, after=0, capacity=16)
    blobs = SampleBlobs(Barred(), call.loop, Replayed(ROUTING), ahead=4)
    fold = StreamFold(reader=reader, config=RULES, state=initial_state(RULES), messages={}, blobs=blobs, lost=lambda *given: True)
    try:
        with pytest.raises(Forbidden):
            await asyncio.wait_for(asyncio.to_thread(fold.next, None, lambda: False), 30)
    finally:
        reader.close()
    assert (await world.bus.state("samples")).last == last
