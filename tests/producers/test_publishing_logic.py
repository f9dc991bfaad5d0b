"""A task's samples are stored under known ids in a known order, and a full stream is waited for. Under a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Receipt
from streamrl.errors import StreamFull
from streamrl.producers import publishing
from streamrl.producers.protocol import Claim, Failure
from streamrl.producers.publishing import MAX_BYTES, PART_BYTES, Published, Publisher, split
from streamrl.producers.slots import FREE, Cut, taken
from streamrl.schemas.codec import decode
from streamrl.schemas.columns import TOKEN_BYTES
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.digests import body_digest
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.events import FULL_BLOBS, FULL_STREAM
from streamrl.schemas.samples import LogprobMode, RewardUpdate, Sample, Tombstone, VersionSpan
from streamrl.schemas.subjects import GRADING, SAMPLES, Subjects
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from streamrl.telemetry.clock import StateClock
from tests.support.virtual import at, elapse, virtual

SUBJECTS = Subjects("r")
TASK = RolloutTask(run="r", index=4, source="main", num_rollouts=3)
CLAIM = Claim(2, 5.0, 6.0)


def sample(rollout: int, *, prompt: int = 1, trained: int = 2, greedy: int = 0, mode: LogprobMode = LogprobMode.SAMPLED) -> Sample:
    """Make a sample of a prompt, tokens that are trained on, and others that were sampled and are not."""
    length = prompt + trained + greedy
    spans = VersionSpan(prompt, None), VersionSpan(trained + greedy, Version(0, 1))
    return Sample(
        run="r",
        policy="policy",
        source="main",
        task=4,
        rollout=rollout,
        group_size=3,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0] * prompt + [1] * trained + [0] * greedy, np.uint8),
        logprobs=np.zeros(length, np.float32),
        spans=spans if mode != LogprobMode.NONE else (VersionSpan(length, None),),
        logprob_mode=mode,
    )


class Stored(MemoryBus):
    """A bus that tells the ids under which it was given messages, and may be full for some calls."""

    def __init__(self) -> None:
        super().__init__("r")
        self.ids: list[str | None] = []
        self.full = 0
        self.dies_after = -1
        self.times: list[float] = []

    def _room(self) -> None:
        self.times.append(at())
        if self.full:
            self.full -= 1
            raise StreamFull("no room")

    async def publish(self, subject: str, body: bytes, **options: Any) -> Receipt:
        self._room()
        if not self.dies_after:
            raise ZeroDivisionError("its process has ended")
        self.dies_after -= 1
        self.ids.append(options["id"])
        return await super().publish(subject, body, **options)

    async def said(self) -> list[tuple[str, str | None, Any]]:
        """Subject without the run, id, and the rollouts of samples or the whole of another record."""
        found: list[tuple[str, str | None, Any]] = []
        for sequence, id in enumerate(self.ids, 1):
            message = await self.fetch(SAMPLES, sequence)
            kind = message.subject.removeprefix("r.")
            headers: Mapping[str, str] = {"Streamrl-Task": "4", "Streamrl-Digest": body_digest(message.body)}
            if kind.startswith("samples"):
                assert message.headers == {**headers, "Streamrl-Schema": "samples/2"}
                found.append((kind, id, [row.rollout for row in decode_samples(message.body).rows()]))
            else:
                assert message.headers == headers
                found.append((kind, id, decode(message.body, Tombstone if kind.startswith("tomb") else RewardUpdate)))
        return found


def stone(reason: str = "failed", rollout: int | None = None, **fields: Any) -> Tombstone:
    return Tombstone(**{"task": 4, "reason": reason, "rollout": rollout, "group_size": 3, "source": "main", **fields})


def test_limits_are_what_the_bus_and_its_readers_take() -> None:
    assert (PART_BYTES, MAX_BYTES) == (1048576, 8323072)


def test_a_part_counts_what_is_trained_and_what_is_not() -> None:
    rows = [sample(0), sample(0, trained=3), sample(1, trained=0, greedy=4), sample(2, trained=1, greedy=2)]
    [part] = split(rows)
    assert (part.first, part.last, part.lengths, part.greedy, part.is_sampled) == (0, 2, {0: 5, 1: 0, 2: 1}, 4, True)
    assert not split([sample(0, mode=LogprobMode.NONE)])[0].is_sampled
    assert split([sample(0, mode=LogprobMode.NONE), sample(1)])[0].is_sampled


def test_a_split_is_in_the_middle_and_encodes_only_what_may_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counting(rows: Sequence[Sample]) -> bytes:
        encoded.append(len(rows))
        return encode_samples(rows)

    monkeypatch.setattr(publishing, "encode_samples", counting)
    rows = [sample(rollout, prompt=30) for rollout in (7, 8, 9) for _ in range(2)]
    whole, tokens = len(encode_samples(rows)), TOKEN_BYTES * 32 * 6

    def parts(part_bytes: int) -> list[tuple[int, int]]:
        encoded.clear()
        return [(part.first, part.last) for part in split(rows, part_bytes=part_bytes)]

    assert tokens < whole
    assert (parts(whole), encoded) == ([(7, 9)], [6])
    assert (parts(whole - 1), encoded) == ([(7, 7), (8, 9)], [6, 2, 4])
    assert (parts(tokens)[0], encoded[0]) == ((7, 7), 6), "only the bytes can tell"
    assert (parts(tokens - 1)[0], encoded[0]) == ((7, 7), 2), "the tokens alone do not fit"
    assert (parts(1), encoded) == ([(7, 7), (8, 8), (9, 9)], [2, 2, 2])
    assert [part.body for part in split(rows, part_bytes=1)] == [encode_samples(rows[n : n + 2]) for n in (0, 2, 4)]


def ended(rollout: int | None, reason: str = "failed", **fields: Any) -> tuple[str, str, Tombstone]:
    return "tombstones.main", "d4" if rollout is None else f"d4.{rollout}", stone(reason, rollout, **{"detail": "x", **fields})


X, Y = Failure(0, "failed", "x"), Failure(2, "failed", "x")
ONE, LATE = replace(X, rollout=1), replace(X, rollout=1, reason="timeout")
TOLD = {"producer": "p", "issued_s": 5.0, "claimed_s": 6.0, "deliveries": 2}
UNTIMED = {"producer": "p", "claimed_s": 6.0, "deliveries": 1}
CASES: dict[str, tuple[list[int], list[Failure], Claim | None, list[tuple[str, str, Any]]]] = {
    "whole": ([0, 1, 2], [], CLAIM, [("samples.main", "s4.0", [0, 1, 2])]),
    "some fail": (
        [1],
        [X, replace(Y, reason="filtered")],
        CLAIM,
        [ended(0, **TOLD), ended(2, "filtered", **TOLD), ("samples.main", "s4.1", [1])],
    ),
    "all fail alike": ([], [X, ONE, Y], Claim(1, 0.0, 6.0), [ended(None, **UNTIMED)]),
    "all fail for two reasons": ([], [X, LATE, Y], None, [ended(0), ended(1, "timeout"), ended(2)]),
    "all fail, said in two ways": ([], [X, replace(ONE, detail="y"), Y], None, [ended(0), ended(1, detail="y"), ended(2)]),
    "two fail alike, one says nothing": ([], [X, Y], None, [ended(0), ended(2)]),
    "nothing": ([], [], None, []),
}


@pytest.mark.parametrize("case", CASES)
@virtual
async def test_what_is_stored_of_a_task(case: str) -> None:
    rollouts, failures, claim, wanted = CASES[case]
    bus = Stored()
    publisher = Publisher(bus, SUBJECTS, producer="p")
    assert await publisher.task(TASK, [sample(rollout) for rollout in rollouts], failures, claim) == set(rollouts)
    assert await bus.said() == wanted
    counts = publisher.take_counts()
    assert (counts.num_rollouts, counts.sampled, counts.num_tokens) == (len(rollouts), [2] * len(rollouts), 2 * len(rollouts))


@virtual
async def test_parts_and_what_fits_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [sample(0), sample(1, prompt=500), sample(2)]
    sizes = [len(encode_samples([row])) for row in rows]
    monkeypatch.setattr(publishing, "MAX_BYTES", sizes[1])
    bus = Stored()
    publisher = Publisher(bus, SUBJECTS, part_bytes=1)
    assert await publisher.task(TASK, rows, []) == {0, 1, 2}
    assert await bus.said() == [("samples.main", f"s4.{n}-{n}", [n]) for n in range(3)]
    monkeypatch.setattr(publishing, "MAX_BYTES", sizes[1] - 1)
    bus = Stored()
    assert await Publisher(bus, SUBJECTS, part_bytes=1).task(TASK, rows, [], CLAIM) == {0, 2}
    first, *others = await bus.said()
    detail = f"{sizes[1]} bytes, at most {sizes[1] - 1} fit a message"
    assert first == ("tombstones.main", "d4.1", stone("failed", 1, detail=detail, **{**TOLD, "producer": ""}))
    assert others == [("samples.main", "s4.0-0", [0]), ("samples.main", "s4.2-2", [2])]
    bus = Stored()
    alone = replace(TASK, num_rollouts=2)
    await Publisher(bus, SUBJECTS).task(alone, [rows[1]], [Failure(0, "failed", detail)])
    assert await bus.said() == [("tombstones.main", "d4", stone(group_size=2, detail=detail))], "with it, all have failed alike"


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1), (1, 3), (2, 3)], ids=str)
@virtual
async def test_a_second_attempt_that_splits_elsewhere_leaves_no_rollout_open(first: int, then: int) -> None:
    """`first`, `then`: how many rollouts a message of the attempt has."""
    rows = [sample(rollout, prompt=30) for rollout in range(3)]
    sizes = {count: len(encode_samples(rows[:count])) for count in (1, 2, 3)}
    bus = Stored()
    bus.dies_after = 1
    with pytest.raises(ZeroDivisionError):
        await Publisher(bus, SUBJECTS, part_bytes=sizes[first]).task(TASK, rows, [])
    bus.dies_after = -1
    await Publisher(bus, SUBJECTS, part_bytes=sizes[then]).task(TASK, rows, [], Claim(2))
    stored = [await bus.fetch(SAMPLES, number) for number in range(1, (await bus.state(SAMPLES)).last + 1)]
    assert {row.rollout for message in stored for row in decode_samples(message.body).rows()} == set(range(3))


@pytest.mark.parametrize(("claim", "again"), [(None, 3), (Claim(1), 3), (Claim(2), 0)])
@virtual
async def test_what_another_delivery_had_stored_is_not_counted(claim: Claim | None, again: int) -> None:
    publisher = Publisher(Stored(), SUBJECTS)
    rows = [sample(0), sample(1, trained=0, greedy=5), sample(2, trained=3)]
    assert len(await publisher.task(TASK, rows, [], claim)) == 3
    counts = publisher.take_counts()
    assert (counts.num_rollouts, counts.sampled, counts.greedy, counts.num_tokens, counts.num_full) == (3, [2, 3], 5, 5, 0)
    assert len(await publisher.task(TASK, rows, [], claim)) == again
    assert publisher.take_counts().num_rollouts == again
    await publisher.task(replace(TASK, index=5), [replace(row, task=5, logprob_mode=LogprobMode.NONE) for row in rows], [])
    await publisher.task(replace(TASK, index=6), [replace(row, task=6) for row in rows], [])
    await publisher.task(replace(TASK, index=7), [replace(row, task=7) for row in rows], [])
    counts = publisher.take_counts()
    assert (counts.num_rollouts, counts.sampled, counts.greedy) == (9, [2, 3, 2, 3], 10), "demonstrations are no tokens of a model"
    assert vars(Published()) == {"num_rollouts": 0, "sampled": [], "greedy": 0, "num_full": 0}


@virtual
async def test_the_end_of_a_task() -> None:
    bus = Stored()
    await Publisher(bus, SUBJECTS).end_task(4, "other", "poison", "why")
    assert await bus.said() == [("tombstones.other", "d4", stone("poison", group_size=1, detail="why", source="other"))]


@pytest.mark.parametrize(
    ("fields", "id"),
    [({}, "w4.1.3"), ({"grading": 8}, "w4.1.3.g8"), ({"agent": "a"}, "w4.1.3.@a"), ({"grading": 8, "agent": "a"}, "w4.1.3.g8.@a")],
)
@virtual
async def test_a_reward_is_known_by_all_that_it_is_for(fields: dict[str, Any], id: str) -> None:
    bus, update = Stored(), RewardUpdate(task=4, rollout=1, reward=0.5, revision=3, **fields)
    assert (await Publisher(bus, SUBJECTS).reward(update)).sequence == 1
    assert await bus.said() == [("rewards", id, update)]


@virtual
async def test_requests_for_rewards_have_numbers_and_fail_by_them() -> None:
    bus = Stored()
    publisher = Publisher(bus, SUBJECTS, producer="p")
    assert [await publisher.grading(TASK, b"body"), await publisher.grading(TASK, b"body")] == [1, 2]
    message = await bus.fetch(GRADING, 1)
    assert (message.subject, message.headers) == ("r.grading.main", {"Streamrl-Task": "4", "Streamrl-Digest": body_digest(b"body")})
    assert all(str(id).startswith("g4.") and len(str(id)) == 19 for id in bus.ids) and len(set(bus.ids)) == 2
    bus.ids.clear()
    await publisher.failed_grading(TASK, Y, 2, CLAIM)
    await publisher.failed_grading(TASK, Y, 2)
    assert bus.ids == ["d4.2.g2", "d4.2.g2"]
    bus.ids.pop()
    assert await bus.said() == [("tombstones.main", "d4.2.g2", stone("failed", 2, detail="x", grading=2, **TOLD))]


@virtual
async def test_rows_beside_samples_are_one_blob_a_rollout() -> None:
    bus = Stored()
    rows = [sample(0), sample(2), sample(2), sample(2)]
    found = await Publisher(bus, SUBJECTS).rows_beside(rows, {1: 3, 0: 2, 3: 4}, "routed_experts", lambda places: bytes(places))
    names = await bus.sample_blobs.names()
    assert found[2].routed_experts is None
    refs = [one.routed_experts for one in found if one.routed_experts is not None]
    assert [(ref.start_row, ref.num_rows) for ref in refs] == [(0, 2), (0, 3), (3, 4)]
    assert [ref.name for ref in refs] == [names[0], names[1], names[1]]
    assert [name[:4] for name in names] == ["4/0.", "4/2."] and {len(name) for name in names} == {12}
    assert [await bus.sample_blobs.get(ref.name) for ref in refs] == [bytes([0]), bytes([1, 3]), bytes([1, 3])]
    assert [len(ref.sha256) for ref in refs] == [64] * 3


@virtual
async def test_a_full_stream_is_waited_for_with_growing_pauses(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    bus = Stored()
    publisher = Publisher(bus, SUBJECTS)
    bus.full = 8
    clock = StateClock(FREE, now=asyncio.get_running_loop().time)

    async def publishing_task() -> None:
        async def found() -> None:
            pass

        with taken(clock, found, Cut()):
            await publisher.task(TASK, [sample(0)], [])

    work = asyncio.create_task(publishing_task())
    await elapse(0.05)
    assert (publisher.stalled, publisher.full) == (True, FULL_STREAM)
    other = asyncio.create_task(publisher.end_task(9, "main", "x", "y"))
    await elapse(0.01)
    assert publisher.stalled and len(bus.times) == 2
    other.cancel()
    await elapse(0.01)
    assert publisher.stalled and caplog.messages == ["event=stalled reason=stream_full error=no room"]
    del bus.times[1]
    await work
    assert bus.times == pytest.approx([0.0, 0.1, 0.3, 0.7, 1.5, 3.1, 5.1, 7.1])
    assert (publisher.stalled, publisher.full, publisher.take_counts().num_full) == (False, "", 2)
    assert caplog.messages[1:] == ["event=resumed reason=room_on_the_stream"]
    assert clock.take() == pytest.approx({FREE: 0.0, "tools": 0.0, "wait_room": 7.1})


@virtual
async def test_full_blobs_are_told_before_a_full_stream() -> None:
    bus = Stored()
    room, put = [False], bus.sample_blobs.put

    async def full(name: str, data: bytes) -> str:
        if not room[0]:
            raise StreamFull("no room")
        return await put(name, data)

    bus.sample_blobs.put = full  # type: ignore[method-assign]
    publisher = Publisher(bus, SUBJECTS)
    assert publisher.full == ""
    beside = asyncio.create_task(publisher.beside(4, 0, b"x"))
    await elapse(0.01)
    assert publisher.full == FULL_BLOBS
    bus.full = 2
    ending = asyncio.create_task(publisher.end_task(4, "main", "x", "y"))
    await elapse(0.01)
    assert publisher.full == FULL_BLOBS
    room[0] = True
    name, digest = await beside
    assert name.startswith("4/0.") and len(digest) == 64
    assert publisher.full == FULL_STREAM
    await ending
    assert publisher.full == ""
