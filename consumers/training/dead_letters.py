"""What cannot be used goes to the stream `dead`, a rollout without its blob ends, and the trainer tells what has ended untrained.

It does so with each heartbeat, of the time since the newest batch: the ledger has it only later.
"""

from __future__ import annotations

import logging
from collections import Counter

import msgspec

from streamrl.bus.protocol import Bus, Message
from streamrl.core.fold import BLOB_MISSING, DeadLetter
from streamrl.core.state import FoldState, PendingTask
from streamrl.errors import Conflict, StreamFull
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Untrained
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.digests import body_digest
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_TASK, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import counted_as

logger = logging.getLogger(__name__)

INLINE_BYTES = 512 << 10
"""A larger record goes into a blob: a message as large as the server takes has no room for a record around it."""

_ENDS_NOTHING = frozenset(("duplicate", "late", "superseded_reward"))
"""Reasons of drops that end no rollout."""
_REASON_CHARS = 300


async def publish_dead_letter(bus: Bus, subjects: Subjects, message: Message, letter: DeadLetter) -> None:
    """Keep a message of the sample stream for the operator; returns once it is stored. A repeat is recognised by its id.

    When the stream `dead` or the blobs have no room, the message is logged and not kept: poison must not stop the stream. The ledger has
    its drop and the reason all the same, and the sample stream its bytes until it is trimmed.
    """
    record = DeadRecord(
        stream=SAMPLES,
        sequence=message.sequence,
        subject=message.subject,
        reason=letter.reason,
        body=bytes(message.body),
        headers={_sound(name): _sound(value) for name, value in message.headers.items()},
        task=letter.task,
        num_bytes=len(message.body),
        time_s=message.time_s,
    )
    data = encode(record)
    try:
        if len(data) > INLINE_BYTES:
            stub = msgspec.structs.replace(record, body=b"", headers={}, blob=f"dead-{message.sequence}")
            await _put(bus, stub.blob, data)
            data = encode(stub)
        await bus.publish(subjects.dead, data, id=f"x{message.sequence}")
    except StreamFull as error:
        logger.error("event=dead_letter_lost sequence=%d reason=%s error=%s", message.sequence, letter.reason, error.message)
        return
    logger.warning("event=message_quarantined sequence=%d reason=%s", message.sequence, letter.reason)


async def publish_blob_missing(bus: Bus, subjects: Subjects, group: PendingTask, rollout: int, why: str) -> bool:
    """Put onto the stream that a rollout ends here, so that a replay decides alike; False while there is no room."""
    stone = Tombstone(task=group.task, reason=BLOB_MISSING, rollout=rollout, group_size=group.group_size, detail=why, source=group.source)
    body = encode(stone)
    headers = {HEADER_TASK: str(group.task), HEADER_DIGEST: body_digest(body)}
    try:
        await bus.publish(subjects.tombstones(group.source), body, id=f"b{group.task}.{rollout}", headers=headers)
    except StreamFull:
        return False
    logger.warning("event=blob_missing task=%d rollout=%d why=%s", group.task, rollout, why)
    return True


async def _put(bus: Bus, name: str, data: bytes) -> None:
    try:
        await bus.blobs.put(name, data)
    except Conflict:
        logger.info("event=dead_letter_known blob=%s", name)


def _sound(text: str) -> str:
    """Text that can be encoded; a foreign client's header may hold half a character."""
    return text.encode(errors="replace").decode()


class UntrainedCounts:
    """Counts of one trainer; `dead` is told by the training thread, `told` is asked by the bus's.

    Args:
        num_rollouts: of a task.
    """

    def __init__(self, num_rollouts: int) -> None:
        self._num_rollouts = num_rollouts
        self._version = Version()
        self._ended = Counter[str]()
        self._num_drops = 0
        self._dead: tuple[Version, int, str] = (self._version, 0, "")

    def dead(self, version: Version, reason: str) -> None:
        """A message cannot be used that was folded into the state of `version`."""
        known, count, _ = self._dead
        self._dead = (version, count + 1 if known == version else 1, reason[:_REASON_CHARS])

    def told(self, state: FoldState, publishing: str) -> Untrained:
        """Tell what there is to say of the fold's state as it is now."""
        if state.version != self._version or state.num_drops < self._num_drops:
            self._version, self._ended, self._num_drops = state.version, Counter(), 0
        for drop in state.drops_after(self._num_drops):
            if drop.reason not in _ENDS_NOTHING:
                self._ended[counted_as(drop.reason)] += len(drop.rollouts) or (self._num_rollouts if drop.retires else 1)
        self._num_drops = state.num_drops
        version, dead, reason = self._dead
        same = version == state.version
        return Untrained(
            ended=dict(self._ended),
            dead=dead if same else 0,
            newest_dead=reason if same else "",
            unrewarded=sum(task.complete and not task.ready for task in state.pending.values()),
            rewarded=state.reward_count,
            reward=state.reward_sum / max(1, state.reward_count),
            publishing=publishing,
        )
