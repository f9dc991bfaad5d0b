"""The publisher asks its transport and the bus for known things, in a known order and number, under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Message, Receipt
from streamrl.errors import LogTruncated, NotFound, WeightSyncError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.telemetry.names import metric
from streamrl.weights.manifest import wire_bytes
from streamrl.weights.protocol import Shard
from streamrl.weights.publisher import Publisher
from tests.support.publishing import publish
from tests.support.virtual import at, elapse, virtual

SUBJECTS = Subjects("r")


def manifest(number: int, epoch: int = 0, value: int | None = None) -> Manifest:
    """Make version `epoch.number`, whose one tensor is full of `value`."""
    return publish({"w": np.full(32, number if value is None else value, np.float32)}, Version(epoch, number)).manifest


class Transport:
    """Tells what it is asked; a version takes it two seconds."""

    def __init__(self, told: list[tuple[Any, ...]], name: str = "") -> None:
        self.told, self.name = told, name
        self.held: set[Version] = set()
        self.gives: dict[Version, Manifest] = {}

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        self.told.append((at(), f"{self.name}publish", str(version), list(shards)))
        await elapse(2.0)
        self.held.add(version)
        return self.gives.get(version, manifest(version.number, version.epoch))

    async def holds(self, known: Manifest) -> bool:
        self.told.append((at(), f"{self.name}holds", str(known.version)))
        return known.version in self.held

    async def retire(self, older_than: Version) -> None:
        self.told.append((at(), f"{self.name}retire", str(older_than)))


class Scene(MemoryBus):
    """A run's bus, and a publisher with its transport."""

    def __init__(self) -> None:
        super().__init__("r")
        self.told: list[tuple[Any, ...]] = []
        self.transport = Transport(self.told)
        self.reports: list[dict[str, float]] = []
        self.duplicates: list[int] = []
        """Sequences that the next calls find their id at."""

    async def publish(self, subject: str, body: bytes, **options: Any) -> Receipt:
        self.told.append((at(), "announce", options["id"]))
        if self.duplicates:
            return Receipt(self.duplicates.pop(0), duplicate=True)
        return await super().publish(subject, body, **options)

    async def report(self, values: dict[str, float]) -> None:
        self.reports.append(values)

    def publisher(self, **options: Any) -> Publisher:
        loop = asyncio.get_running_loop()
        return Publisher(self, SUBJECTS, self.transport, policy="policy", loop=loop, **options)  # type: ignore[arg-type]

    async def stored(self, *manifests: Manifest | bytes) -> None:
        for one in manifests:
            await super().publish(SUBJECTS.weights("policy"), one if isinstance(one, bytes) else encode(one))

    async def announced(self) -> list[Manifest]:
        state = await self.state(WEIGHTS)
        return [decode((await self.fetch(WEIGHTS, n)).body, Manifest) for n in range(state.first, state.last + 1)]


def offer(to: Publisher, number: int, epoch: int = 0, digest: str = "") -> None:
    to.offer(Version(epoch, number), digest or manifest(number, epoch).digest, iter([number]))  # type: ignore[arg-type,list-item]


async def closed(one: Publisher) -> None:
    """Close it from the loop's own thread."""
    with pytest.raises(TimeoutError):
        one.close(0.0)
    await elapse(60.0)
    one.close(0.0)


@virtual
async def test_bytes_then_manifest_then_what_is_old(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene = Scene()
    mirror = Transport(scene.told, "mirror ")
    one = scene.publisher(keep=2, report=scene.report, mirrors={"disk": mirror})
    for number in range(4):
        offer(one, number)
        await elapse(10.0)
    await closed(one)
    each = [
        [
            (10.0 * n, "publish", f"0.{n}", [n]),
            (10.0 * n + 2, "mirror publish", f"0.{n}", [n]),
            (10.0 * n + 4, "announce", f"wpolicy.0.{n}.0"),
            *([(10.0 * n + 4, "retire", f"0.{n - 1}"), (10.0 * n + 4, "mirror retire", f"0.{n - 1}")] if n > 1 else []),
        ]
        for n in range(4)
    ]
    asked = [(10.0 * n, "holds", f"0.{n - 1}") for n in range(1, 4)]
    assert [one for one in scene.told if one[1] != "holds"] == [line for lines in each for line in lines]
    assert [one for one in scene.told if one[1] == "holds"] == [line for line in asked if line in scene.told]
    manifests = await scene.announced()
    assert [(m.version.number, m.digest) for m in manifests] == [(n, manifest(n).digest) for n in range(4)]
    assert [dict(m.mirrors) for m in manifests] == [{"disk": manifest(n).parts} for n in range(4)]
    assert scene.reports == [{"weights/publish_s": 4.0, "weights/bytes_total": float(wire_bytes(m))} for m in manifests]
    assert all(metric(name).name == name for name in scene.reports[0])
    assert caplog.messages == [
        f"event=weights_published policy=policy version=0.{n} bytes={wire_bytes(m)} took_s=4.000" for n, m in enumerate(manifests)
    ]


@pytest.mark.parametrize(("keep", "published"), [(4, [0, 3]), (0, [0, 1, 2, 3])])
@virtual
async def test_the_newest_takes_the_place_of_what_waits_unless_all_are_kept(
    keep: int, published: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    scene, offered = Scene(), []

    def told(version: Version, kept: Sequence[Version]) -> None:
        offered.append((version.number, [one.number for one in kept]))

    one = scene.publisher(keep=keep, offered=told)
    offer(one, 0)
    await elapse(1.0)
    for number in (1, 2, 3):
        offer(one, number)
    await closed(one)
    assert [m.version.number for m in await scene.announced()] == published
    assert offered == [(0, []), *((n, [0] if keep else list(range(n))) for n in (1, 2, 3))]
    assert not [line for line in scene.told if line[1] == "retire"]
    replaced = [message for message in caplog.messages if "replaced" in message]
    assert replaced == [f"event=weights_replaced policy=policy version=0.{n} by=0.{n + 1}" for n in (1, 2)] * (keep > 0)
    with pytest.raises(WeightSyncError) as caught:
        offer(one, 4)
    assert caught.value.values == {"version": "0.4", "closed": True}


@virtual
async def test_offers_while_it_closes_are_refused_and_what_waits_is_published() -> None:
    scene = Scene()
    one = scene.publisher(keep=0)
    offer(one, 0)
    await elapse(1.0)
    offer(one, 1)
    with pytest.raises(TimeoutError):
        one.close(0.0)
    with pytest.raises(WeightSyncError) as caught:
        offer(one, 2)
    assert caught.value.values == {"version": "0.2", "closed": True}
    await elapse(10.0)
    one.close(0.0)
    assert [m.version.number for m in await scene.announced()] == [0, 1]


@virtual
async def test_other_bytes_than_the_ledger_has_end_it() -> None:
    scene = Scene()
    one = scene.publisher()
    offer(one, 1, digest="other")
    await elapse(5.0)
    for again in (lambda: offer(one, 2), lambda: one.close(0.0)):
        with pytest.raises(WeightSyncError) as caught:
            again()
        assert caught.value.values == {"version": "0.1", "expected": "other", "got": manifest(1).digest}
    assert await scene.announced() == []


RESTARTS: dict[str, tuple[list[Any], list[int], dict[str, int], int, list[str], list[str]]] = {
    "the same, which is there": ([1], [1], {}, 1, ["0.1"], []),
    "the same, whose bytes are gone": ([1], [], {}, 1, ["0.1"], ["wpolicy.0.1.1"]),
    "announced twice, whose bytes are gone": ([1, 1], [], {}, 1, ["0.1"], ["wpolicy.0.1.2"]),
    "an older one": ([1, 3], [3], {}, 2, ["0.3"], []),
    "an older one, and the newest is gone": ([1, 3], [1], {}, 2, ["0.3"], ["wpolicy.0.2.0"]),
    "an older one that was announced and is gone": ([1, 3], [3], {}, 1, ["0.1", "0.3"], []),
    "an older one where all are kept": ([1, 3], [3], {"keep": 0}, 2, [], ["wpolicy.0.2.0"]),
    "an announced one where all are kept": ([1, 3], [3], {"keep": 0}, 1, ["0.1"], ["wpolicy.0.1.1"]),
    "a newer one": ([1, 3], [1, 3], {}, 4, [], ["wpolicy.0.4.0"]),
    "behind something that is no manifest": ([1, b"\xc1", 3], [3], {}, 3, ["0.3"], []),
    "nothing before": ([], [], {}, 0, [], ["wpolicy.0.0.0"]),
}


@pytest.mark.parametrize("case", RESTARTS)
@virtual
async def test_a_restart_repeats_only_what_cannot_be_fetched(case: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    before, held, options, offered, asked, announced = RESTARTS[case]
    scene = Scene()
    await scene.stored(*(one if isinstance(one, bytes) else manifest(one) for one in before))
    scene.transport.held = {Version(0, number) for number in held}
    one = scene.publisher(**options)
    await asyncio.sleep(0.0)
    offer(one, offered)
    await closed(one)
    assert [line[2] for line in scene.told if line[1] == "holds"] == asked
    assert [line[2] for line in scene.told if line[1] == "announce"] == announced
    assert (f"event=weights_already_out policy=policy version=0.{offered}" in caplog.messages) == (not announced)
    unreadable = [message for message in caplog.messages if message.startswith("event=weights_manifest_unreadable")]
    assert [message.partition(" reason=")[0] for message in unreadable] == (
        ["event=weights_manifest_unreadable policy=policy action=skipped"] if b"\xc1" in before else []
    )
    assert all("r.weights.policy sequence 2" in message for message in unreadable)


@virtual
async def test_a_version_that_was_announced_with_other_weights_is_refused() -> None:
    scene = Scene()
    await scene.stored(manifest(1))
    scene.transport.gives[Version(0, 1)] = manifest(1, value=7)
    one = scene.publisher()
    offer(one, 1, digest=manifest(1, value=7).digest)
    await elapse(5.0)
    with pytest.raises(WeightSyncError):
        one.close(0.0)
    assert not [line for line in scene.told if line[1] == "publish"]
    scene.transport.gives[Version(1, 1)] = manifest(1, 1, value=7)
    forked = scene.publisher()
    offer(forked, 1, 1, digest=manifest(1, 1, value=7).digest)
    await closed(forked)
    assert [str(m.version) for m in await scene.announced()] == ["0.1", "1.1"]


@virtual
async def test_four_versions_keep_their_bytes_unless_it_is_told_otherwise() -> None:
    scene = Scene()
    await scene.stored(*map(manifest, range(5)))
    await scene.trim(WEIGHTS, through=2)
    one = scene.publisher()
    for number in (5, 6):
        offer(one, number)
        await elapse(5.0)
    await closed(one)
    assert [line[2] for line in scene.told if line[1] == "retire"] == ["0.3"], "of 2 to 5 none, of 2 to 6 one"


@virtual
async def test_what_is_retired_is_forgotten() -> None:
    scene = Scene()
    one = scene.publisher(keep=1)
    for number in (0, 1):
        offer(one, number)
        await elapse(5.0)
    offer(one, 0, digest="whatever")
    await closed(one)
    assert [line[1:] for line in scene.told[-2:]] == [("retire", "0.1"), ("holds", "0.1")], "a newer one is out"


@pytest.mark.parametrize(
    ("duplicates", "ids"),
    [([1], ["wpolicy.0.5.0"]), ([2], ["wpolicy.0.5.0", "wpolicy.0.5.1"]), ([9, 2], ["wpolicy.0.5.0", "wpolicy.0.5.1", "wpolicy.0.5.2"])],
)
@virtual
async def test_a_known_id_is_this_manifest_only_where_its_message_is(duplicates: list[int], ids: list[str]) -> None:
    """Message 1 is the manifest, 2 another one, 9 is gone."""
    scene = Scene()
    one = scene.publisher()
    await elapse(0.1)
    await scene.stored(manifest(5), manifest(6))
    scene.duplicates = duplicates
    offer(one, 5)
    await closed(one)
    assert [line[2] for line in scene.told if line[1] == "announce"] == ids
    with pytest.raises(NotFound):
        await scene.fetch(WEIGHTS, 9)


@virtual
async def test_manifests_that_go_while_they_are_read_are_read_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    scene = Scene()
    await scene.stored(manifest(1), manifest(2))
    scene.transport.held = {Version(0, 1), Version(0, 2)}
    read, times, ended = scene.read, [], []

    async def cut(stream: str, *, after: int, subject: str | None = None) -> AsyncIterator[Message]:
        times.append((after, subject))
        try:
            async for message in read(stream, after=after, subject=subject):
                yield message
                if len(times) == 1:
                    raise LogTruncated("it begins at 2")
        finally:
            ended.append(at())

    scene.read = cut  # type: ignore[method-assign]
    one = scene.publisher()
    await asyncio.sleep(0.0)
    await scene.trim(WEIGHTS, through=0)
    offer(one, 2)
    await closed(one)
    assert times == [(0, "r.weights.policy")] * 2 and ended == [0.0, 0.0]
    assert caplog.messages == [
        "event=weights_manifests_trimmed policy=policy action=read_again",
        "event=weights_already_out policy=policy version=0.2",
    ]


@virtual
async def test_manifests_of_others_and_later_ones_are_not_recalled() -> None:
    scene = Scene()
    await scene.stored(manifest(1))
    await MemoryBus.publish(scene, SUBJECTS.weights("other"), encode(replace(manifest(9), policy="other")))
    one = scene.publisher()
    offer(one, 2)
    await closed(one)
    assert [line[1] for line in scene.told] == ["publish", "announce"]
