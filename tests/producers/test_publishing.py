from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, Receipt
from streamrl.producers import publishing
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.protocol import Failure
from streamrl.producers.publishing import Publisher, split
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import LogprobMode, Sample, VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from tests.support.producing import Loop, samples_in, tombstones_in

NUM_ROLLOUTS = 6


def make_samples(run: str, rollouts: Sequence[int], *, length: int = 1000) -> tuple[RolloutTask, list[Sample]]:
    """Two samples for each rollout, of `length` model tokens each."""
    task = RolloutTask(run=run, index=4, source="main", num_rollouts=NUM_ROLLOUTS)
    model = Segment((7,) * length, (-0.5,) * length, (VersionSpan(length, Version(0, 1)),))
    episodes = [
        Episode(segments=(Segment((1, 2)), model), finish_reason="length", rollout=rollout, reward=float(rollout))
        for rollout in rollouts
        for _ in range(2)
    ]
    return task, samples_of(task, episodes, producer="p")


def test_a_large_task_is_split_by_whole_rollouts() -> None:
    _, samples = make_samples("run", range(NUM_ROLLOUTS))
    one = split(samples)
    assert [(part.first, part.last) for part in one] == [(0, 5)]
    parts = split(samples, part_bytes=40_000)
    assert len(parts) > 1
    assert all(len(part.body) <= 40_000 for part in parts)
    rows = [row for part in parts for row in decode_samples(part.body).rows()]
    assert [(row.rollout, row.sample) for row in rows] == [(sample.rollout, sample.sample) for sample in samples]
    # A rollout is never cut, however large.
    assert [(part.first, part.last) for part in split(samples, part_bytes=1)] == [(k, k) for k in range(NUM_ROLLOUTS)]


def test_what_is_too_large_by_its_tokens_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, samples = make_samples("run", range(NUM_ROLLOUTS))
    encoded: list[int] = []

    def counting(rows: Sequence[Sample]) -> bytes:
        encoded.append(len(rows))
        return encode_samples(rows)

    monkeypatch.setattr(publishing, "encode_samples", counting)
    parts = split(samples, part_bytes=70_000)
    assert encoded == [6, 6] and len(parts) == 2
    # Where the tokens alone would fit, only the bytes can tell.
    whole = len(encode_samples(samples))
    encoded.clear()
    assert len(split(samples, part_bytes=whole)) == 1 and len(split(samples, part_bytes=whole - 1)) == 2
    assert encoded == [12, 12, 6, 6]


class Died(Exception):
    """Stands for the end of the process."""


class DyingBus:
    """Publishes `after` messages, then ends the process that publishes."""

    def __init__(self, bus: Bus, *, after: int) -> None:
        self._bus = bus
        self._left = after

    async def publish(self, *args: Any, **keywords: Any) -> Receipt:
        if not self._left:
            raise Died
        self._left -= 1
        return await self._bus.publish(*args, **keywords)


async def test_a_second_attempt_that_splits_elsewhere_leaves_no_rollout_open(loop: Loop) -> None:
    for index, (first_bytes, second_bytes) in enumerate(((40_000, 60_000), (60_000, 40_000), (40_000, 1 << 20))):
        task, samples = make_samples(loop.config.run.name, range(NUM_ROLLOUTS))
        task = replace(task, index=index)
        samples = [replace(sample, task=task.index) for sample in samples]
        before = (await loop.bus.state("samples")).last
        with pytest.raises(Died):
            await Publisher(DyingBus(loop.bus, after=1), loop.subjects, part_bytes=first_bytes).task(task, samples, [])  # type: ignore[arg-type]
        await Publisher(loop.bus, loop.subjects, part_bytes=second_bytes).task(task, samples, [])
        records = await loop.records((await loop.bus.state("samples")).last)
        assert {sample.rollout for sample in samples_in(records[before:])} == set(range(NUM_ROLLOUTS))


async def test_tombstones_come_before_the_samples_they_complete(loop: Loop) -> None:
    task, samples = make_samples(loop.config.run.name, [0, 2, 3, 4], length=10)
    publisher = Publisher(loop.bus, loop.subjects)
    await publisher.task(task, samples, [Failure(1, "failed", "x"), Failure(5, "filtered", "y")])
    records = await loop.records(3)
    assert [(t.rollout, t.reason) for t in tombstones_in(records[:2])] == [(1, "failed"), (5, "filtered")]
    assert {sample.rollout for sample in samples_in(records[2:])} == {0, 2, 3, 4}
    # The second attempt had all six, but its message has the id of the first one's and is not stored: the tombstones end the rest.
    await publisher.task(task, make_samples(loop.config.run.name, range(NUM_ROLLOUTS), length=10)[1], [])
    assert (await loop.bus.state("samples")).last == 3


async def test_a_rollout_too_large_for_a_message_ends_as_failed(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    task, samples = make_samples(loop.config.run.name, range(NUM_ROLLOUTS))
    large = [s for s in make_samples(loop.config.run.name, [3], length=4000)[1]]
    samples = [s for s in samples if s.rollout < 3] + large + [s for s in samples if s.rollout > 3]
    monkeypatch.setattr(publishing, "MAX_BYTES", 60_000)
    await Publisher(loop.bus, loop.subjects, part_bytes=40_000).task(task, samples, [])
    records = await loop.records((await loop.bus.state("samples")).last)
    [stone] = tombstones_in(records)
    assert (stone.rollout, stone.reason) == (3, "failed") and "at most 60000 fit" in stone.detail
    assert {sample.rollout for sample in samples_in(records)} == {0, 1, 2, 4, 5}


async def test_the_tokens_of_what_is_stored_are_counted_but_not_those_of_demonstrations(loop: Loop) -> None:
    task, samples = make_samples(loop.config.run.name, range(NUM_ROLLOUTS), length=10)
    publisher = Publisher(loop.bus, loop.subjects)
    await publisher.task(task, samples, [])
    counts = publisher.take_counts()
    assert (counts.num_rollouts, counts.num_tokens) == (NUM_ROLLOUTS, NUM_ROLLOUTS * 2 * 10)
    await publisher.task(
        replace(task, index=5, source="warmup"), [replace(one, task=5, logprob_mode=LogprobMode.NONE) for one in samples], []
    )
    counts = publisher.take_counts()
    assert (counts.num_rollouts, counts.num_tokens) == (NUM_ROLLOUTS, 0)
