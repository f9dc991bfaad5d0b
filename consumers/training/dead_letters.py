"""What cannot be used: a message goes to the stream `dead`, with the reason, its bytes and its headers; a rollout without its blob ends."""

from __future__ import annotations

import logging

import msgspec

from streamrl.bus.protocol import Bus, Message
from streamrl.core.fold import BLOB_MISSING, DeadLetter
from streamrl.core.state import PendingTask
from streamrl.errors import Conflict, StreamFull
from streamrl.schemas.codec import encode
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.digests import body_digest
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_TASK, SAMPLES, Subjects

logger = logging.getLogger(__name__)

INLINE_BYTES = 512 << 10
"""A larger record goes into a blob: a message as large as the server takes has no room for a record around it."""


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
