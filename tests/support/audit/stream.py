"""The sample stream as an auditor reads it: which rollouts a message holds, how old their tokens are, what it says of its task."""

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tests.support.audit.msgpack import unpack
from tests.support.audit.raw import Stored

TASK_HEADER = "Streamrl-Task"


@dataclass(frozen=True)
class Rollout:
    """One rollout of a message."""

    rows: int
    tokens: int
    """Tokens of all rows, trained or not."""
    oldest: int | None
    """Lowest version number over the spans that hold trained tokens; None when no model sampled any of them."""
    newest: int | None
    highest: int
    """Highest version number of any span; -1 when there is none."""
    grading: int = 0
    """The request for its reward; 0: none."""


@dataclass(frozen=True)
class Message:
    """One message of the sample stream. `rollouts` is empty unless it holds readable samples."""

    sequence: int
    kind: str
    task: int | None
    """Task of its body, else of its header."""
    group_size: int
    rollouts: dict[int, Rollout]
    ended: int | None = None
    """The rollout that a tombstone ends."""
    grading: int = 0
    """The request for rewards that a tombstone says has failed; 0: none."""
    ends_task: bool = False
    """A tombstone of a whole task, or a broken message whose header names its task."""
    broken: bool = False


def read_message(stored: Stored) -> Message:
    """Never raises: what cannot be read is `broken`."""
    kind = stored.subject.split(".")[1]
    header = stored.headers.get(TASK_HEADER, "")
    named = int(header) if header.isascii() and header.isdigit() and len(header) <= 18 else None
    try:
        if kind == "samples":
            return _samples(stored.sequence, stored.body, header)
        if kind == "tombstones":
            return _tombstone(stored.sequence, unpack(stored.body))
        return Message(stored.sequence, kind, None, 0, {})
    except (pa.ArrowException, ValueError, KeyError, TypeError, OSError, StopIteration, MemoryError):
        return Message(stored.sequence, kind, named, 0, {}, ends_task=named is not None, broken=True)


def _tombstone(sequence: int, stone: dict[str, Any]) -> Message:
    rollout = stone.get("rollout")
    return Message(sequence, "tombstones", stone["task"], stone.get("group_size", 1), {}, rollout, stone.get("grading", 0), rollout is None)


def _samples(sequence: int, body: bytes, header: str) -> Message:
    with pa.ipc.open_stream(body) as reader:
        batch = reader.read_next_batch()
    batch.validate(full=True)
    names = ("task", "rollout", "group_size", "loss_mask", "span_length", "span_number")
    columns = {name: batch.column(name).to_pylist() for name in names}
    tasks = set(columns["task"])
    if len(tasks) != 1 or (header and header != str(columns["task"][0])):
        raise ValueError(f"expected rows of one task, the header's, got {tasks} and {header!r}")
    asked = batch.column("grading").to_pylist() if "grading" in batch.schema.names else [None] * batch.num_rows
    gradings = {rollout: number for rollout, number in zip(columns["rollout"], asked, strict=True) if number}
    found: dict[int, list[tuple[int, list[int], int]]] = {}
    for row, rollout in enumerate(columns["rollout"]):
        trained, highest = _versions(columns["loss_mask"][row], columns["span_length"][row], columns["span_number"][row])
        found.setdefault(rollout, []).append((len(columns["loss_mask"][row]), trained, highest))
    rollouts = {}
    for rollout, rows in found.items():
        trained = [number for _, numbers, _ in rows for number in numbers]
        tokens = sum(length for length, _, _ in rows)
        highest = max(number for _, _, number in rows)
        of = gradings.get(rollout, 0)
        rollouts[rollout] = Rollout(len(rows), tokens, min(trained, default=None), max(trained, default=None), highest, of)
    return Message(sequence, "samples", columns["task"][0], columns["group_size"][0], rollouts)


def _versions(mask: list[int], lengths: list[int], numbers: list[int]) -> tuple[list[int], int]:
    """Version numbers of the spans of one row that hold trained tokens, and the highest of all its spans."""
    if sum(lengths) != len(mask):
        raise ValueError(f"expected spans over {len(mask)} tokens, got {sum(lengths)}")
    trained, start = [], 0
    for length, number in zip(lengths, numbers, strict=True):
        if number >= 0 and any(mask[start : start + length]):
            trained.append(number)
        start += length
    return trained, max(numbers, default=-1)
