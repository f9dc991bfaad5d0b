"""Messages that a checkpoint carries itself, so that the sample stream may be trimmed above them.

A group that waits (for a part that a dead producer still owes, for a reward that comes hours later) would otherwise pin everything behind
it: a full stream then could never be trimmed, and what the group waits for could never be stored. A trainer under pressure copies the
messages of its pending groups into its checkpoint, and its position moves to where it has read. There are at most (S + 1) * B such groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import msgspec

from streamrl.bus.protocol import Log, Message
from streamrl.core.state import FoldState
from streamrl.models.directories import damaged, unreadable
from streamrl.schemas.subjects import SAMPLES

CARRIED_FILE = "carried.msgpack"
_AT_ONCE = 32


def held(state: FoldState) -> set[int]:
    """Sequences of the messages that the state's pending groups are made of."""
    return {r.sequence for task in state.pending.values() for r in task.rollouts.values()}


def oldest_read_again(state: FoldState, carried: Iterable[int]) -> int:
    """Lowest sequence that a trainer resuming from this state reads from the stream when its checkpoint carries `carried`."""
    return min([*(held(state) - set(carried)), state.cursor + 1])


async def fetch_messages(bus: Log, sequences: Iterable[int]) -> dict[int, Message]:
    """Copies of stored messages by sequence; raises NotFound."""
    gate = asyncio.Semaphore(_AT_ONCE)

    async def fetch(sequence: int) -> Message:
        async with gate:
            found = await bus.fetch(SAMPLES, sequence)
            return msgspec.structs.replace(found, body=bytes(found.body), headers=dict(found.headers))

    messages = await asyncio.gather(*(fetch(sequence) for sequence in sequences))
    return {message.sequence: message for message in messages}


def carried_files(messages: Iterable[Message]) -> dict[str, bytes]:
    """What a checkpoint that carries these messages has beside its own files; nothing when there are none."""
    found = list(messages)
    return {CARRIED_FILE: msgspec.msgpack.encode(found)} if found else {}


def read_carried(checkpoint: Path) -> dict[int, Message]:
    """The messages that a checkpoint carries, by sequence; none if it was written without pressure.

    Raises:
        CheckpointDamaged: the file is not what was written.
    """
    path = checkpoint / CARRIED_FILE
    if not path.exists():
        return {}
    try:
        messages = msgspec.msgpack.decode(path.read_bytes(), type=list[Message])
    except OSError as error:
        raise unreadable(checkpoint, error) from error
    except msgspec.MsgspecError as error:
        raise damaged(checkpoint, f"expected messages in {CARRIED_FILE}, got: {error}") from error
    return {message.sequence: message for message in messages}
