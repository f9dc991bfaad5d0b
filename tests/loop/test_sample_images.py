"""Images that samples name: stored before their task, checked before a batch closes, kept as long as a task may name them."""

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.config.tree import BusConfig, Config, DataConfig, RunConfig, TasksConfig
from streamrl.consumers.training import trimming
from streamrl.consumers.training.checkpoints import hold
from streamrl.consumers.training.sample_blobs import Replayed
from streamrl.consumers.training.trimming import trim_if_full
from streamrl.data.images import RowImage
from streamrl.data.problems import Problem, Problems
from streamrl.errors import EngineUnavailable, NotFound, SchemaError, StreamFull
from streamrl.producers.feeder import Feeder, plan
from streamrl.producers.images import TaskImages
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant
from streamrl.schemas.events import FULL_BLOBS
from streamrl.schemas.images import StoredImages, image_blob, image_of, window_named
from streamrl.schemas.samples import Sample
from streamrl.schemas.subjects import HEADER_TASK, KEY_GRANTED, SAMPLES, TASKS, Subjects
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.loop.test_sample_blobs import World, episode
from tests.support.buses import MakeBus
from tests.support.images import GIF, JPEG, png
from tests.support.processes import until

PICTURES = (png(1), GIF)


@pytest.fixture
def world() -> World:
    made = World(MemoryBus("r"), "r")
    made.images, made.replayed = True, Replayed()
    return made


async def publish(world: World, change: Callable[[Sample], Sample] = lambda sample: sample, *, body: bytes = b"") -> BlobRef:
    """A group of two whose row has two images; rollout 0's sample is changed."""
    ref, stored = image_blob(PICTURES, (0, 7))
    if body:
        digest = hashlib.sha256(body).hexdigest()
        ref, stored = BlobRef(f"0-7/{digest}", digest, 0, 2), body
    await world.bus.sample_blobs.put(ref.name, stored)
    rows = tuple(map(image_of, PICTURES))

    def named(sample: Sample) -> Sample:
        sample = replace(sample, images=ref, image_rows=rows)
        return change(sample) if sample.rollout == 0 else replace(sample, images=None, image_rows=())

    await world.publish([episode(0, [1, 2], None), episode(1, [3], None)], named)
    return ref


OTHER, OTHER_BODY = image_blob([png(9)], (8, 15))


def changed(**changes: object) -> Callable[[Sample], Sample]:
    def change(sample: Sample) -> Sample:
        assert sample.images is not None
        return replace(sample, images=replace(sample.images, **changes))

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(name="../../etc/passwd"), "expected the name of a blob of task 0"),
        (changed(name=OTHER.name, sha256=OTHER.sha256), "expected the name of a blob of task 0"),  # another's, which is there
        (changed(name="0/0.00000000"), "expected the name of a blob of task 0"),
        (changed(sha256="ab" * 32), "expected a blob with SHA-256"),
        (changed(name=f"0-7/{'ab' * 32}", sha256="ab" * 32), "got none"),
        (changed(start_row=1), "expected image/png of"),
        (changed(start_row=1 << 40), "got no images"),
        (lambda sample: replace(sample, image_rows=(image_of(png(5)), image_of(GIF))), "expected image/png of"),
        (lambda sample: replace(sample, image_rows=()), "expected no images"),
    ],
)
async def test_a_sample_that_names_anothers_ends_its_rollout(world: World, change: Callable[[Sample], Sample], said: str) -> None:
    await world.bus.sample_blobs.put(OTHER.name, OTHER_BODY)
    await publish(world, change)
    _, drop = await world.dropped()
    assert said in drop.detail and "images of sample 0" in drop.detail


@pytest.mark.parametrize(
    "body", [b"\x00", bytes(range(256)), encode(StoredImages((png(1)[:-9], GIF))), encode(StoredImages((png(1), JPEG)))], ids=range(4)
)
async def test_a_blob_that_holds_something_else_ends_its_rollout(world: World, body: bytes) -> None:
    await publish(world, body=body)
    await world.dropped()


async def test_samples_are_trained_with_their_images_and_without_them_for_good(world: World) -> None:
    """What was decided stands in the record on the stream; and who only trains again what was trained looks at no image."""
    ref = await publish(world)
    batch, _ = await world.batch()
    assert batch.rollouts.tolist() == [0, 1] and batch.routed_experts is None
    await world.bus.sample_blobs.delete(ref.name)
    first, _ = await world.batch()
    await world.bus.sample_blobs.put(ref.name, image_blob(PICTURES, (0, 7))[1])
    again, _ = await world.batch()
    assert first.rollouts.tolist() == again.rollouts.tolist() == [1]


FIRST, SECOND = (png(shade) + bytes(5000) for shade in (1, 2))
ROWS = [(FIRST,), (FIRST,), (FIRST, SECOND), ()]
PROBLEMS = Problems(
    problems=tuple(
        Problem(row=n, line=n + 1, prompt_ids=(n,), prompt="p", images=tuple(RowImage(image_of(data), data) for data in row))
        for n, row in enumerate(ROWS * 250)
    ),
    digest="d",
)


def config(run: str) -> Config:
    tasks = TasksConfig(batch_tasks=100, max_staleness=4, num_rollouts=2)
    return Config(run=RunConfig(name=run), data=DataConfig(images_key="images", shuffle=False), tasks=tasks)


def test_rows_with_the_same_images_have_one_blob_in_a_window() -> None:
    planned = plan(Grant(1000, 0, 0), 0, 1000, PROBLEMS, config("r"))
    windows = [window_named(name) for name in planned.blobs]
    assert sorted(filter(None, windows)) == [(0, 499)] * 2 + [(500, 999)] * 2, "500 rows with the first image in each"
    for task in planned.tasks:
        if not task.images:
            assert task.row % 4 == 3 and b"image" not in encode(task)
            continue
        assert isinstance(task.image_blob, BlobRef)
        stored = decode(planned.blobs[task.image_blob.name], StoredImages).images
        assert stored == ROWS[task.row % 4] and tuple(map(image_of, stored)) == task.images
    assert decode(encode(planned.tasks[2]), RolloutTask) == planned.tasks[2]
    assert plan(Grant(1000, 0, 0), 600, 700, PROBLEMS, config("r")).tasks == planned.tasks[600:700], "whoever plans them"


async def test_they_are_there_before_their_tasks_and_wait_for_room(make_bus: MakeBus, run_id: str) -> None:
    bus = await make_bus(BusConfig(sample_blobs_bytes=100_000, patience_s=10))
    await bus.sample_blobs.put("9/0.00000000", bytes(97_000))
    feeder = Feeder(bus, Subjects(run_id), config(run_id), PROBLEMS)
    running = asyncio.create_task(feeder.run())
    try:
        await bus.kv.put(KEY_GRANTED, encode(Grant(40, 0, 0)))
        async with asyncio.timeout(60):
            await until(lambda: feeder.full == FULL_BLOBS)
            assert (await bus.state(TASKS)).last == 0
            await bus.sample_blobs.delete("9/0.00000000")
            while (await bus.state(TASKS)).last < 40:
                await asyncio.sleep(0.01)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    tasks = [decode((await bus.fetch(TASKS, n + 1)).body, RolloutTask) for n in range(40)]
    named = {task.image_blob.name for task in tasks if isinstance(task.image_blob, BlobRef)}
    assert named == set(await bus.sample_blobs.names()) and len(named) == 2
    images = TaskImages(bus.sample_blobs, tasks[2])
    assert [await images(place) for place in range(2)] == [FIRST, SECOND]
    with pytest.raises(SchemaError):
        await images(2)
    with pytest.raises(NotFound):
        await TaskImages(bus.sample_blobs, replace(tasks[2], image_rows=(image_of(GIF),) * 2))(0)

    class Away:
        async def get(self, name: str) -> bytes:
            raise StreamFull("not now")

    with pytest.raises(EngineUnavailable):
        await TaskImages(Away(), tasks[2])(0)


async def test_they_go_with_the_last_message_of_their_window(make_bus: MakeBus, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of four tasks: one that is gone, one of which a message is left, one that a checkpoint holds, one with an open task."""
    bus = await make_bus(BusConfig(sample_blobs_bytes=100_000, patience_s=10))
    for first in range(0, 20, 4):
        await bus.sample_blobs.put(f"{first}-{first + 3}/{'ab' * 32}", bytes(15_000))
    for task in [*range(4), 8, 9, 10, 11, 4, 5, 6, 12, 13, 14, 15, 7, 16]:
        await bus.publish(Subjects(run_id).samples("main"), b"x", headers={HEADER_TASK: str(task)})

    async def left() -> list[int]:
        await trim_if_full(bus)
        return sorted(window[0] for name in await bus.sample_blobs.names() if (window := window_named(name)))

    await hold(bus, "main", 16, Version(0, 1), carried=(9,))
    assert await left() == [0, 4, 8, 12, 16], "nobody says which tasks have ended"
    assert (await bus.state(SAMPLES)).first == 16
    await bus.kv.put(KEY_GRANTED, encode(Grant(20, 1, 14, 0, 14)))
    await hold(bus, "main", 17, Version(0, 1), carried=(9,))
    assert await left() == [8, 12, 16], "those of the second window with its last message, task 7's"
    await bus.publish(Subjects(run_id).tombstones("main"), b"x", headers={HEADER_TASK: "12"})
    await bus.kv.put(KEY_GRANTED, encode(Grant(20, 2, 18, 0, 18)))
    await bus.sample_blobs.put(f"20-23/{'ab' * 32}", bytes(45_000))
    await hold(bus, "main", 18, Version(0, 2))
    assert await left() == [12, 16, 20], "a late record keeps the fourth"
    await bus.trim(SAMPLES, through=(await bus.state(SAMPLES)).last)
    assert await left() == [12, 16, 20], "there is nothing to trim any more"
    monkeypatch.setattr(trimming, "TRIM_EVERY_S", 0.02)
    keeping = asyncio.create_task(trimming.keep_trimmed(bus, images=True))
    async with asyncio.timeout(60):
        while await left() != [16, 20]:
            await asyncio.sleep(0.02)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
