"""Messages of a sample stream, valid ones and mutated ones, made fast: an encoded template whose task and version are patched in place."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from streamrl.schemas.codec import encode
from streamrl.schemas.columns import SCHEMA_NAME, arrow_schema
from streamrl.schemas.digests import body_digest
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import MARK_EPOCH, EpochMark, Mark, RewardUpdate, Sample, Tombstone, VersionSpan
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK, Subjects
from streamrl.schemas.versions import Version
from tests.support.rows import message, table

GROUP = 2
TASK = 0x5A5A5A5A5A5A5A5A
NUMBER = 0x3B3B3B3B3B3B3B3B
RUN = "run"
SUBJECTS = Subjects(RUN)


@dataclass(frozen=True)
class Sent:
    """One message as a producer sends it. `kind` says how it was made."""

    kind: str
    subject: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


def template(rollouts: tuple[int, ...], **values: Any) -> bytes:
    """Whole rollouts of the task TASK, sampled by version 0.NUMBER; `values` replace fields of every sample."""
    base: dict[str, Any] = dict(
        run="run",
        policy="policy",
        source="main",
        task=TASK,
        group_size=GROUP,
        tokens=np.array([5, 6, 7, 8], np.int32),
        loss_mask=np.array([0, 0, 1, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.0], np.float32),
        spans=(VersionSpan(2, None), VersionSpan(2, Version(0, NUMBER))),
    )
    rewards = {} if "reward" in values else {k: float(k) for k in rollouts}
    return encode_samples([Sample(**base | {"rollout": k, "reward": rewards.get(k)} | values) for k in rollouts])


def patched(body: bytes, task: int, number: int) -> bytes:
    return body.replace(TASK.to_bytes(8, "little"), task.to_bytes(8, "little")).replace(
        NUMBER.to_bytes(8, "little"), number.to_bytes(8, "little", signed=True)
    )


def broken_tables() -> dict[str, bytes]:
    """Templates that are Arrow, but not samples that can be used."""
    whole = template((0, 1))

    def changed(**columns: list[Any]) -> bytes:
        return message(table(whole) | columns)

    ours = arrow_schema()
    foreign = ours.with_metadata({b"streamrl.schema": b"samples/9"})
    wider = ours.append(pa.field("extra", pa.int64(), nullable=False))
    other = ours.set(ours.get_field_index("tokens"), pa.field("tokens", pa.list_(pa.int64()), nullable=False))
    fewer = ours.remove(ours.get_field_index("logprobs"))
    nan = [0.0, 0.0, float("nan"), -1.0]
    return {
        "foreign schema": message(table(whole), foreign),
        "no schema": message(table(whole), ours.remove_metadata()),
        "column added": message(table(whole) | {"extra": [1, 2]}, wider),
        "column of another type": message(table(whole), other),
        "column missing": message(table(whole), fewer),
        "log-prob is NaN": changed(logprobs=[nan, nan]),
        "log-prob above 0": changed(logprobs=[[0.0, 0.0, 0.5, -1.0]] * 2),
        "mask longer than tokens": changed(loss_mask=[[0, 0, 1, 1, 1]] * 2),
        "mask on the first token": changed(loss_mask=[[1, 0, 1, 1]] * 2),
        "spans too short": changed(span_length=[[1, 2]] * 2),
        "epoch of the future": changed(span_epoch=[[-1, 7]] * 2),
        "group of another size": changed(group_size=[9, 9]),
        "rollout beyond the group": changed(rollout=[0, 5]),
        "infinite reward": changed(reward=[float("inf"), 0.0]),
        "no rows": message({name: [] for name in ours.names}),
    }


class Author:
    """Makes messages for tasks of a run at a version; everything comes from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.whole = template((0, 1))
        self.halves = [template((k,)) for k in range(GROUP)]
        self.unrewarded = template((0, 1), reward=None)
        self.broken = broken_tables()
        self.mutations: list[Callable[[Sent, int], Sent]] = [*5 * [self.bytes_of], self.headers_of, *2 * [self.subject_of], self.values_of]

    def valid(self, task: int, number: int) -> Sent:
        """Make the message of a sound producer for a task, at the trainer's present version or a little before."""
        number = max(0, number - self.random.choice([0, 0, 1, 2]))
        pick = self.random.random()
        if pick < 0.7:
            body = self.random.choice([self.whole, self.whole, self.whole, self.unrewarded, *self.halves])
            return self.samples("samples", patched(body, task, number), task)
        if pick < 0.8:
            rollout = self.random.choice([None, 0, 1])
            stone = Tombstone(task=task, reason="failed", rollout=rollout, group_size=GROUP, source="main")
            return self.record("tombstone", SUBJECTS.tombstones("main"), encode(stone), task)
        if pick < 0.97:
            rollout, revision = self.random.randrange(GROUP), self.random.randint(1, 4)
            update = RewardUpdate(task=task, rollout=rollout, reward=self.random.random(), revision=revision)
            return self.record("reward", SUBJECTS.rewards, encode(update), task)
        return self.record("mark", SUBJECTS.marks, encode(Mark(name="note", detail={"n": number})), None)

    def mutated(self, task: int, number: int) -> Sent:
        return self.mutate(self.valid(task, number), number)

    def mutate(self, sent: Sent, number: int) -> Sent:
        return self.random.choice(self.mutations)(sent, number)

    def samples(self, kind: str, body: bytes, task: int) -> Sent:
        headers = {HEADER_TASK: str(task), HEADER_SCHEMA: SCHEMA_NAME, HEADER_DIGEST: body_digest(body)}
        return Sent(kind, SUBJECTS.samples("main"), body, headers)

    def record(self, kind: str, subject: str, body: bytes, task: int | None) -> Sent:
        return Sent(kind, subject, body, {HEADER_DIGEST: body_digest(body)} | ({} if task is None else {HEADER_TASK: str(task)}))

    def bytes_of(self, sent: Sent, number: int) -> Sent:
        """Bytes changed; now and then by somebody who makes the digest fit again, or leaves it out."""
        body = bytearray(sent.body)
        match self.random.randrange(5):
            case 0 | 1:
                for _ in range(self.random.choice([1, 1, 2, 8])):
                    body[self.random.randrange(len(body))] = self.random.randrange(256)
            case 2:
                del body[self.random.randrange(len(body)) :]
            case 3:
                start = self.random.randrange(len(body))
                body[start:start] = self.random.randbytes(self.random.randrange(40))
            case _:
                body = bytearray(self.random.randbytes(self.random.randrange(200)))
        headers = dict(sent.headers)
        match self.random.randrange(4):
            case 0:
                headers[HEADER_DIGEST] = body_digest(bytes(body))
            case 1:
                del headers[HEADER_DIGEST]
        return Sent("bytes", sent.subject, bytes(body), headers)

    def headers_of(self, sent: Sent, number: int) -> Sent:
        """One header missing, wrong, or not what it should be."""
        headers = dict(sent.headers)
        name = self.random.choice([HEADER_TASK, HEADER_DIGEST, HEADER_SCHEMA])
        value = self.random.choice([None, "", "-1", "abc", "9" * 30, "samples/3", "0" * 64, str(self.random.randrange(10**6)), "é\u2028"])
        if value is None:
            headers.pop(name, None)
        else:
            headers[name] = value
        return Sent("headers", sent.subject, sent.body, headers)

    def subject_of(self, sent: Sent, number: int) -> Sent:
        """Sent to another place of the stream, or to one that there is not."""
        places = ["samples.main", "samples.ghost", "tombstones.main", "rewards", "marks", "secrets.main", "samples", "x"]
        return Sent("subject", f"{RUN}.{self.random.choice(places)}", sent.body, sent.headers)

    def values_of(self, sent: Sent, number: int) -> Sent:
        """Well written, by somebody who does not know what is so: tasks, versions, groups, rewards that cannot be."""
        task = int(sent.headers.get(HEADER_TASK, "0"))
        match self.random.randrange(6):
            case 0 | 1:
                name = self.random.choice(list(self.broken))
                return self.samples(name, patched(self.broken[name], task, number), task)
            case 2:
                newer = number + self.random.choice([1, 2, 10**12])
                return self.samples("version of the future", patched(self.whole, task, newer), task)
            case 3:
                beyond = task + self.random.choice([1000, 10**9, 10**15])
                return self.samples("task of the future", patched(self.whole, beyond, number), beyond)
            case 4:
                wrongs = [{"rollout": 7}, {"task": 10**12}, {"reward": float("nan")}, {"revision": 0}, {"sample": 9}, {"task": -1}]
                update = RewardUpdate(**{"task": task, "rollout": 0, "reward": 0.5} | self.random.choice(wrongs))
                return self.record("wrong reward", SUBJECTS.rewards, encode(update), task)
            case _:
                epoch = EpochMark(self.random.choice([0, 5, 2**40]), self.random.choice([0, 1, number + 1]), self.random.choice([0, 3]))
                body = encode(Mark(name=MARK_EPOCH, detail={"epoch": epoch.epoch, "first": epoch.first, "last_before": epoch.last_before}))
                return self.record("wrong epoch", SUBJECTS.marks, body, None)
