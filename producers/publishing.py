"""Records onto the sample stream: one Arrow message per task, split by whole rollouts when it is large, tombstones first.

Order and ids make a second delivery of a task harmless. Tombstones of failed rollouts go first; so when a redelivered task finds its sample
message stored already (same id), every rollout that this message lacks has its tombstone before it, and none is left open. The parts of
a split task carry their range of rollouts in the id, because a second attempt may split elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from streamrl.bus.protocol import Bus, Receipt
from streamrl.errors import StreamFull
from streamrl.producers.protocol import Claim, Failure
from streamrl.producers.slots import phase
from streamrl.runtime.retries import pause_s
from streamrl.schemas.codec import encode
from streamrl.schemas.columns import SCHEMA_NAME, TOKEN_BYTES
from streamrl.schemas.digests import body_digest
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.events import FULL_BLOBS, FULL_SERVER, FULL_STREAM
from streamrl.schemas.samples import BlobRef, LogprobMode, RewardUpdate, Sample, Tombstone
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, Subjects
from streamrl.schemas.tasks import RolloutTask

T = TypeVar("T")
logger = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""A message larger than this is split, as far as whole rollouts allow."""
MAX_BYTES = (8 << 20) - (64 << 10)
"""Largest body the bus takes; a single rollout above it ends as failed."""
_FULL_FIRST_S = 0.1
_FULL_MAX_S = 2.0


class Part:
    """One message: consecutive rollouts of a task, encoded."""

    def __init__(self, samples: Sequence[Sample], body: bytes) -> None:
        self.first = samples[0].rollout
        self.last = samples[-1].rollout
        self.lengths: dict[int, int] = {}
        """Tokens that are trained on, by rollout; a greedy one has none."""
        self.greedy = sum(sample.num_sampled for sample in samples if not sample.loss_mask.any())
        """Tokens that a model sampled for greedy rollouts."""
        self.is_sampled = any(sample.logprob_mode is not LogprobMode.NONE for sample in samples)
        """Whether a model sampled them; demonstrations are not."""
        for sample in samples:
            self.lengths[sample.rollout] = self.lengths.get(sample.rollout, 0) + int(np.count_nonzero(sample.loss_mask))
        self.body = body


def split(samples: Sequence[Sample], *, part_bytes: int = PART_BYTES) -> list[Part]:
    """Encode samples sorted by rollout; halves by rollouts until each part fits or is a single rollout."""
    rollouts = sorted({sample.rollout for sample in samples})
    # What is too large by its tokens alone is not encoded to find that out.
    if len(rollouts) == 1 or TOKEN_BYTES * sum(len(sample.tokens) for sample in samples) <= part_bytes:
        part = Part(samples, encode_samples(samples))
        if len(part.body) <= part_bytes or len(part.lengths) == 1:
            return [part]
    middle = rollouts[len(rollouts) // 2]
    lower = [sample for sample in samples if sample.rollout < middle]
    return split(lower, part_bytes=part_bytes) + split(samples[len(lower) :], part_bytes=part_bytes)


class Published:
    """What has happened since the last report."""

    def __init__(self) -> None:
        self.num_rollouts = 0
        """Rollouts stored."""
        self.sampled: list[int] = []
        """Tokens that a model sampled, of each of them that is neither a demonstration nor greedy."""
        self.greedy = 0
        """Tokens that a model sampled for those that are."""
        self.num_full = 0
        """Records that had to wait for room."""

    @property
    def num_tokens(self) -> int:
        """All that were sampled for rollouts that are trained."""
        return sum(self.sampled)


def _stone(task: RolloutTask, failure: Failure) -> Tombstone:
    return Tombstone(
        task=task.index,
        reason=failure.reason,
        rollout=failure.rollout,
        group_size=task.num_rollouts,
        detail=failure.detail,
        source=task.source,
    )


class Publisher:
    """Stores the records of tasks. A full stream makes it wait, with the finished samples in hand, until there is room."""

    def __init__(self, bus: Bus, subjects: Subjects, *, producer: str = "", part_bytes: int = PART_BYTES) -> None:
        self._bus = bus
        self._subjects = subjects
        self._producer = producer
        self._part_bytes = part_bytes
        self._waiting_for = Counter[str]()
        self._counts = Published()

    @property
    def stalled(self) -> bool:
        """Whether a record, or what it names, is waiting for room."""
        return bool(self.full)

    @property
    def full(self) -> str:
        """FULL_SERVER, FULL_BLOBS or FULL_STREAM, by what there is no room in; empty: nothing waits."""
        return next((place for place in (FULL_SERVER, FULL_BLOBS, FULL_STREAM) if self._waiting_for[place] > 0), "")

    def take_counts(self) -> Published:
        """What has happened since the last call."""
        counts, self._counts = self._counts, Published()
        return counts

    async def task(
        self, task: RolloutTask, samples: Sequence[Sample], failures: Sequence[Failure], claim: Claim | None = None
    ) -> frozenset[int]:
        """Store everything a task gave; returns once all of it is stored.

        Args:
            task: the task.
            samples: its samples, sorted by rollout, whole rollouts only.
            failures: the rollouts that gave none.
            claim: of the task, for those.

        Returns:
            The rollouts whose samples were stored: none that another delivery of the task had stored before.
        """
        stored: set[int] = set()
        parts = split(samples, part_bytes=self._part_bytes) if samples else []
        large = [part for part in parts if len(part.body) > MAX_BYTES]
        failures = [*failures, *(Failure(p.first, "failed", f"{len(p.body)} bytes, at most {MAX_BYTES} fit a message") for p in large)]
        if len(failures) == task.num_rollouts and len({(f.reason, f.detail) for f in failures}) == 1:
            first = failures[0]
            await self.end_task(task.index, task.source, first.reason, first.detail, group_size=task.num_rollouts, claim=claim)
            return frozenset()
        for failure in failures:
            await self._end_rollout(task, failure, claim)
        for part in parts:
            if len(part.body) <= MAX_BYTES:
                id = f"s{task.index}.{part.first}" if len(parts) == 1 else f"s{task.index}.{part.first}-{part.last}"
                receipt = await self._put(self._subjects.samples(task.source), part.body, id, task.index, SCHEMA_NAME)
                # At a first delivery a repeat is this publisher's own, after a broken connection.
                if not receipt.duplicate or claim is None or claim.deliveries <= 1:
                    self._count(part)
                    stored.update(part.lengths)
        return frozenset(stored)

    def _count(self, part: Part) -> None:
        self._counts.num_rollouts += len(part.lengths)
        if part.is_sampled:
            self._counts.sampled += [length for length in part.lengths.values() if length]
            self._counts.greedy += part.greedy

    async def end_task(self, index: int, source: str, reason: str, detail: str, *, group_size: int = 1, claim: Claim | None = None) -> None:
        """Store a tombstone for a whole task."""
        stone = self._told(Tombstone(task=index, reason=reason, group_size=group_size, detail=detail, source=source), claim)
        await self._put(self._subjects.tombstones(source), encode(stone), f"d{index}", index)

    async def beside(self, task: int, rollout: int, body: bytes) -> tuple[str, str]:
        """Store what a rollout's samples will name, before them; returns name and SHA-256 (hex). A name is never used again."""
        name = f"{task}/{rollout}.{secrets.token_hex(4)}"
        return name, await self._with_room(lambda: self._bus.sample_blobs.put(name, body), FULL_BLOBS)

    async def rows_beside(
        self, samples: Sequence[Sample], rows: Mapping[int, int], column: str, body: Callable[[Sequence[int]], bytes]
    ) -> list[Sample]:
        """The samples, those that have rows with a reference to them: a blob for each rollout is stored `beside`.

        Args:
            samples: sorted by rollout.
            rows: how many those of a sample are, by its place.
            column: that names them in a sample.
            body: the blob with the rows of the samples at these places, one after the other.
        """
        given = list(samples)
        for rollout in sorted({samples[place].rollout for place in rows}):
            places = [place for place in rows if samples[place].rollout == rollout]
            name, digest = await self.beside(samples[places[0]].task, rollout, body(places))
            first = 0
            for place in places:
                given[place] = replace(samples[place], **{column: BlobRef(name, digest, first, rows[place])})
                first += rows[place]
        return given

    async def reward(self, update: RewardUpdate) -> Receipt:
        """Store a reward that comes by itself; a repeat of the same task, rollout, agent, revision and request is recognised by its id."""
        id = f"w{update.task}.{update.rollout}.{update.revision}"
        if not isinstance(update.grading, msgspec.UnsetType):
            id += f".g{update.grading}"
        if not isinstance(update.agent, msgspec.UnsetType):
            id += f".@{update.agent}"
        return await self._put(self._subjects.rewards, encode(update), id, update.task)

    async def grading(self, task: RolloutTask, body: bytes) -> int:
        """Store a request for rewards (`streamrl.producers.grading`); returns its number. Each call makes another one."""
        return (await self._put(self._subjects.grading(task.source), body, f"g{task.index}.{secrets.token_hex(8)}", task.index)).sequence

    async def failed_grading(self, task: RolloutTask, failure: Failure, grading: int, claim: Claim | None = None) -> None:
        """Store the tombstone of a rollout that could not be scored, at the request `grading`."""
        stone = msgspec.structs.replace(self._told(_stone(task, failure), claim), grading=grading)
        id = f"d{task.index}.{failure.rollout}.g{grading}"
        await self._put(self._subjects.tombstones(task.source), encode(stone), id, task.index)

    def _told(self, stone: Tombstone, claim: Claim | None) -> Tombstone:
        if claim is None:
            return stone
        told = msgspec.structs.replace(stone, producer=self._producer, claimed_s=claim.claimed_s, deliveries=claim.deliveries)
        return msgspec.structs.replace(told, issued_s=claim.issued_s) if claim.issued_s else told

    async def _end_rollout(self, task: RolloutTask, failure: Failure, claim: Claim | None) -> None:
        stone = self._told(_stone(task, failure), claim)
        await self._put(self._subjects.tombstones(task.source), encode(stone), f"d{task.index}.{failure.rollout}", task.index)

    async def _put(self, subject: str, body: bytes, id: str, task: int, schema: str = "") -> Receipt:
        headers = {HEADER_TASK: str(task), HEADER_DIGEST: body_digest(body)}
        if schema:
            headers[HEADER_SCHEMA] = schema
        return await self._with_room(lambda: self._bus.publish(subject, body, id=id, headers=headers))

    async def _with_room(self, store: Callable[[], Awaitable[T]], place: str = FULL_STREAM) -> T:
        try:
            return await store()
        except StreamFull as error:
            return await self._wait_for_room(store, full_place(error, place), error)

    async def _wait_for_room(self, store: Callable[[], Awaitable[T]], place: str, error: StreamFull) -> T:
        self._counts.num_full += 1
        self._waiting(place, +1, error)
        try:
            attempt = 0
            with phase("wait_room"):
                while True:
                    attempt += 1
                    await asyncio.sleep(pause_s(attempt, first_s=_FULL_FIRST_S, most_s=_FULL_MAX_S))
                    with contextlib.suppress(StreamFull):
                        return await store()
        finally:
            self._waiting(place, -1, error)

    def _waiting(self, place: str, change: int, error: StreamFull) -> None:
        was_stalled = self.stalled
        self._waiting_for[place] += change
        if self.stalled and not was_stalled:
            logger.warning("event=stalled reason=stream_full error=%s", error.message)
        elif was_stalled and not self.stalled:
            logger.info("event=resumed reason=room_on_the_stream")


def full_place(error: StreamFull, place: str) -> str:
    """Tell what has no room: the stream or the bucket (`place`), or the server for any of them."""
    return FULL_SERVER if error.values.get("server") else place
