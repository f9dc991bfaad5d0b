"""A small run written by hand, message by message, and put on a real server; tests then bend one thing.

B = 2 groups a batch, S = 1 version, 2 rollouts a task. Three versions are trained; on the way a task fails, a message is broken, a
group has no spread, one is late, one is stale, and one is half there at the end.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from streamrl.bus.protocol import Bus
from streamrl.config.load import dump
from streamrl.config.tree import Config, RunConfig, TasksConfig
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Grant, Latest, Position, RunRecord
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.ledger import Drop, LedgerEntry, Used
from streamrl.schemas.samples import Sample, Tombstone, VersionSpan
from streamrl.schemas.subjects import HEADER_TASK, Subjects
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest

TOKENS = 4
CONFIG = Config(run=RunConfig(name="forged", steps=3), tasks=TasksConfig(batch_tasks=2, num_rollouts=2, max_staleness=1))


def rows(task: int, rollouts: tuple[int, ...] = (0, 1), *, first: int = 0, last: int | None = None, group: int = 2) -> bytes:
    """Whole rollouts of a task: two prompt tokens, one sampled by version `first`, one by `last`."""
    spans = (VersionSpan(2, None), VersionSpan(1, Version(0, first)), VersionSpan(1, Version(0, first if last is None else last)))
    made = [
        Sample(
            run="forged",
            policy="policy",
            source="main",
            task=task,
            rollout=rollout,
            group_size=group,
            tokens=np.arange(TOKENS, dtype=np.int32),
            loss_mask=np.array([0, 0, 1, 1], np.uint8),
            logprobs=np.zeros(TOKENS, np.float32),
            spans=spans,
            reward=float(rollout),
        )
        for rollout in rollouts
    ]
    return encode_samples(made)


def manifest(number: int, digest: str | None = None, epoch: int = 0) -> Manifest:
    """Version `number` on offer, with the digest that `entry` gives it."""
    return Manifest(
        run="forged",
        policy="policy",
        version=Version(epoch, number),
        tensors=(),
        parts=(),
        transport="bus",
        digest=digest or f"{number:016x}",
        nbytes=0,
    )


def entry(number: int, used: tuple[Used, ...], drops: tuple[Drop, ...], cursor: int, retired: int, ages: tuple[int, ...]) -> LedgerEntry:
    """The entry of version `number`, all of whose messages have been forged here."""
    return LedgerEntry(
        run="forged",
        trainer="main",
        version=Version(0, number),
        source="main",
        used=used,
        drops=drops,
        cursor=cursor,
        granted=retired + 4,
        retired=retired,
        digest=f"{number:016x}",
        staleness=ages,
        num_samples=4,
        num_tokens=4 * TOKENS,
        fence=1,
    )


@dataclass
class Forged:
    """The run; lists are edited in place by tests, `put` writes them."""

    issued: int = 13
    queued: set[int] = field(default_factory=lambda: {7, 11, 12})
    samples: list[tuple[str, bytes, int | None]] = field(default_factory=list)
    """(kind, body, task in the header)"""
    entries: list[LedgerEntry] = field(default_factory=list)
    manifests: list[Manifest] = field(default_factory=lambda: [manifest(number) for number in range(4)])
    publish_first: bool = False
    """Publish the manifests before the ledger."""
    dead: set[int] = field(default_factory=lambda: {4})
    keys: list[tuple[str, Any]] = field(default_factory=list)
    """In the order in which they are put."""
    config: Config = field(default_factory=lambda: CONFIG)
    trim: int = 0

    async def put(self, bus: Bus, run: str) -> None:
        s = Subjects(run)
        for task in range(self.issued):
            await bus.publish(s.tasks("main"), encode(RolloutTask(run=run, index=task, source="main")))
        for lease in await bus.claim("main", max=self.issued, wait_s=5.0):
            await (lease.retry() if lease.sequence - 1 in self.queued else lease.done())
        for kind, body, task in self.samples:
            subject = {"samples": s.samples("main"), "tombstones": s.tombstones("main")}[kind]
            await bus.publish(subject, body, headers={} if task is None else {HEADER_TASK: str(task)})
        if self.publish_first:
            await self._offer(bus, s)
        for one in self.entries:
            await bus.publish(s.ledger("main"), encode(one))
        if not self.publish_first:
            await self._offer(bus, s)
        for sequence in sorted(self.dead):
            record = DeadRecord(stream="samples", sequence=sequence, subject=s.samples("main"), reason="broken", body=b"")
            await bus.publish(s.dead, encode(record))
        for key, value in [("run", self._record(run)), *self.keys]:
            await bus.kv.put(key, encode(value))
        if self.trim:
            await bus.trim("samples", through=self.trim)

    async def _offer(self, bus: Bus, s: Subjects) -> None:
        for one in self.manifests:
            await bus.publish(s.weights("policy"), encode(one))

    def _record(self, run: str) -> RunRecord:
        return RunRecord(run=run, config=dump(self.config), dataset_digest="", num_rows=1, code_version="0", fingerprint={}, created_s=0.0)


def good_run() -> Forged:
    samples: list[tuple[str, bytes, int | None]] = [
        ("samples", rows(0), 0),  # 1
        ("samples", rows(1, (0,)), 1),
        ("tombstones", encode(Tombstone(task=2, reason="failed", group_size=2)), 2),
        ("samples", b"broken", 3),
        ("samples", rows(1, (1,)), 1),  # 5
        ("samples", rows(4), 4),
        ("samples", rows(0), 0),
        ("samples", rows(5, first=0, last=1), 5),
        ("samples", rows(6, first=1), 6),
        ("samples", rows(7, (0,), first=1), 7),  # 10
        ("samples", rows(8, first=0), 8),
        ("samples", rows(9, first=1), 9),
        ("samples", rows(10, first=2), 10),
        ("samples", rows(0), 0),  # beyond the last cursor
    ]
    both = (0, 1)
    drops = (
        (Drop(3, 2, (), "failed", retires=True), Drop(4, 3, (), "poison", "broken", retires=True)),
        (Drop(6, 4, both, "zero_variance", retires=True), Drop(7, 0, both, "late")),
        (Drop(11, 8, both, "stale", retires=True),),
    )
    entries = [
        entry(1, (Used(0, both, (1, 1)), Used(1, both, (2, 5))), drops[0], 5, 4, (0, 0)),
        entry(2, (Used(5, both, (8, 8)), Used(6, both, (9, 9))), drops[1], 9, 7, (1, 0)),
        entry(3, (Used(9, both, (12, 12)), Used(10, both, (13, 13))), drops[2], 13, 10, (1, 0)),
    ]
    keys: list[tuple[str, Any]] = [
        ("granted", Grant(14, 3, 10)),
        ("latest/main", Latest("main", Version(0, 2), "checkpoints/main", 9, 10)),
        ("positions/main", Position("main", "samples", 10, Version(0, 2))),
    ]
    return Forged(samples=samples, entries=entries, keys=keys)
