"""Checkpoints as they are stored: the user's bytes, and the turns that they may refer to, as this worker recorded them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.chat_saves import MAX_BYTES, chats_in
from streamrl.producers.children.calls import Recorded
from streamrl.producers.episode import Segment
from streamrl.schemas.samples import LogprobMode

_MARK = b"streamrl-rollout-1\n"


class _Turn(msgspec.Struct, frozen=True):
    segment: Segment
    mode: LogprobMode
    engine: str


class _Saved(msgspec.Struct, frozen=True):
    data: bytes
    turns: tuple[_Turn, ...]


def pack(data: bytes, turns: Sequence[Recorded]) -> bytes:
    """The user's `data` and the turns, as one checkpoint; raises SchemaError when they are more than `unpack` takes."""
    kept = tuple(_Turn(turn.part(0, len(turn.token_ids)), turn.mode, turn.engine) for turn in turns)
    body = msgspec.msgpack.encode(_Saved(data, kept))
    if len(body) > MAX_BYTES:
        raise SchemaError(f"a checkpoint may have {MAX_BYTES} bytes with its turns, got {len(body)}", hint="store less of the rollout")
    return _MARK + zlib.compress(body, 1)


def unpack(stored: bytes) -> tuple[bytes, list[Recorded]]:
    """The user's data and the recorded turns; of a checkpoint from before turns were recorded, those of its chats.

    Raises:
        SchemaError: the bytes are damaged.
    """
    if not stored.startswith(_MARK):
        chats = chats_in(stored).values()
        return stored, [_recorded(segment, chat.mode, chat.engine) for chat in chats for segment in chat.segments if segment.is_model]
    try:
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(stored[len(_MARK) :], MAX_BYTES)
        if not unpacking.eof:
            raise SchemaError(f"expected a checkpoint of at most {MAX_BYTES} bytes, got more, or only its beginning")
        saved = msgspec.msgpack.decode(body, type=_Saved)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise SchemaError(f"expected a checkpoint of a rollout, got {len(stored)} bytes that are none: {error}") from error
    return saved.data, [_recorded(turn.segment, turn.mode, turn.engine) for turn in saved.turns]


def _recorded(segment: Segment, mode: LogprobMode, engine: str) -> Recorded:
    turn = Recorded(segment)
    turn.mode, turn.engine = mode, engine
    return turn
