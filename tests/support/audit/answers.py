"""Compare a gateway's answers with the sample stream: every answer is on it, and each sampled token is trained once.

Like the rest of the audit it knows nothing of the product: an agent writes down its answers, an engine (where there is one at hand) what it
gave, and the stream is read with pyarrow.
"""

import struct
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from tests.support.audit.msgpack import unpack
from tests.support.audit.raw import Stored

Place = tuple[int, int]
"""Task and rollout."""


@dataclass(frozen=True)
class Answer:
    """One answered call, as its agent has it."""

    task: int
    rollout: int
    prompt: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...] = ()
    """(epoch, number) of each token; only an engine knows them."""

    @property
    def whole(self) -> tuple[int, ...]:
        return self.prompt + self.ids


@dataclass(frozen=True)
class Row:
    tokens: tuple[int, ...]
    mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[tuple[int, int], ...]


@dataclass
class Sessions:
    """The samples of each rollout on the stream, and how often it ends there."""

    rows: dict[Place, list[Row]] = field(default_factory=dict)
    stones: dict[Place, set[tuple[str, str]]] = field(default_factory=lambda: defaultdict(set))
    """Reasons and details."""
    problems: list[str] = field(default_factory=list)


def read_sessions(messages: Iterable[Stored], producer: str = "gateway-") -> Sessions:
    """Samples made by workers of this name, and all tombstones."""
    found = Sessions()
    for stored in messages:
        kind = stored.subject.split(".")[1]
        if kind == "tombstones":
            stone = unpack(stored.body)
            for rollout in range(stone.get("group_size", 1)) if stone.get("rollout") is None else (stone["rollout"],):
                found.stones[stone["task"], rollout].add((stone["reason"], stone.get("detail", "")))
        elif kind == "samples":
            for place, rows in _rows(stored, producer).items():
                if found.rows.setdefault(place, rows) != rows:
                    found.problems.append(f"task {place[0]} rollout {place[1]} is on the stream with two contents")
    return found


def _rows(stored: Stored, producer: str) -> dict[Place, list[Row]]:
    try:
        with pa.ipc.open_stream(stored.body) as reader:
            batch = reader.read_next_batch()
    except (pa.ArrowException, OSError):
        return {}  # the audit proper says what becomes of those
    names = ("task", "rollout", "producer", "tokens", "loss_mask", "logprobs", "span_length", "span_epoch", "span_number")
    found: dict[Place, list[Row]] = {}
    for task, rollout, made_by, tokens, mask, logprobs, *spans in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
        if made_by.startswith(producer):
            versions = [(epoch, number) for length, epoch, number in zip(*spans, strict=True) for _ in range(length)]
            found.setdefault((task, rollout), []).append(Row(tuple(tokens), tuple(mask), tuple(logprobs), tuple(versions)))
    return found


def check(
    sessions: Sessions, answers: Sequence[Answer], ended: Iterable[Place], made: Sequence[Answer] = (), *, queued: Collection[int] = ()
) -> list[str]:
    problems = list(sessions.problems)
    of: dict[Place, list[Answer]] = defaultdict(list)
    for answer in answers:
        of[answer.task, answer.rollout].append(answer)
    for place in ended:
        stones = sessions.stones.get(place, set())
        if place in sessions.rows or place[0] in queued or any(detail.startswith("reward: ") for _, detail in stones):
            continue  # the last: the run's own reward has failed it
        problems.append(
            f"{_name(place)} was ended by its agent, and " + (f"ends as {sorted(stones)}" if stones else "is not on the stream")
        )
    for place, rows in sessions.rows.items():
        problems += _session(place, rows, of.pop(place, []))
    lost = [place for place in of if place not in sessions.stones and place[0] not in queued]
    problems += [f"{_name(place)} has answers, and neither samples nor a tombstone" for place in lost]
    known: dict[tuple[int, ...], list[Answer]] = defaultdict(list)
    for one in made:
        known[one.whole].append(one)
    if made:
        problems += [problem for place, rows in sessions.rows.items() for row in rows for problem in _made(place, row, known)]
    return problems


def _name(place: Place) -> str:
    return f"session {place[0]}.{place[1]}"


def _session(place: Place, rows: list[Row], answers: list[Answer]) -> list[str]:
    """An answer that another goes on from is trained, and so is the newest; nothing else is, and nothing twice."""
    problems = []
    kept = [a for a in answers if a is answers[-1] or any(b.prompt[: len(a.whole)] == a.whole for b in answers)]
    for answer in kept:
        start, end = len(answer.prompt), len(answer.whole)
        there = [row for row in rows if row.tokens[:end] == answer.whole]
        trained = [row for row in there if all(row.mask[start:end])]
        if len(trained) != 1:
            problems.append(
                f"{_name(place)}: an answer of {end - start} tokens is trained in {len(trained)} of {len(there)} samples with it"
            )
        problems += [
            f"{_name(place)}: log-probs {row.logprobs[start:end]} in its sample, {answer.logprobs} in its answer"
            for row in trained
            if row.logprobs[start:end] != single(answer.logprobs)
        ]
    sampled, trained_tokens = sum(len(a.ids) for a in kept), sum(sum(row.mask) for row in rows)
    if sampled != trained_tokens:
        problems.append(f"{_name(place)}: {trained_tokens} tokens are trained, its agent was given {sampled} that it kept")
    return problems


def _made(place: Place, row: Row, known: dict[tuple[int, ...], list[Answer]]) -> list[str]:
    """Each trained stretch of a row is what an engine gave for the tokens before it, by one version or several."""
    problems = []
    end = 0
    while 1 in row.mask[end:]:
        start = row.mask.index(1, end)
        end = next((k for k in range(start, len(row.mask)) if not row.mask[k]), len(row.mask))
        found = [one for one in known[row.tokens[:end]] if len(one.prompt) == start]
        same = [one for one in found if row.logprobs[start:end] == single(one.logprobs) and row.versions[start:end] == one.versions]
        if not same:
            problems.append(
                f"{_name(place)}: tokens {start} to {end} are not what an engine gave: {len(found)} answers of these tokens, none with "
                f"versions {row.versions[start:end]} and its log-probs"
            )
    return problems


def single(values: Sequence[float]) -> tuple[float, ...]:
    """As 32-bit floats keep them."""
    return struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values))
