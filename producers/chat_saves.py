"""Chats as a rollout's checkpoint: what `chat.save()` stores and `engine.chat(task)` goes on from, token for token."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.episode import Segment
from streamrl.producers.protocol import Context
from streamrl.schemas.samples import LogprobMode

MAX_BYTES = 64 << 20
"""Of the chats of a rollout before they are compressed. What is stored is bounded too, but 1 MiB may unpack to a thousand times that."""
_MARK = b"streamrl-chats-1\n"
"""Begins a checkpoint of chats; user code that stores its own bytes has another beginning."""


class Turn(msgspec.Struct, frozen=True):
    """One completion of the model within a chat."""

    text: str
    """Decoded, without the stop token."""
    token_ids: tuple[int, ...]
    """As sampled; a stop token is the last."""
    finish_reason: str
    """`stop` or `length`."""


class SavedChat(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a chat but what the producer gives again: tokenizer, sampling, format."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    finish_reason: str
    mode: LogprobMode
    engine: str
    started_s: float
    state: Any = None
    """The producer's own."""


class ChatSaves:
    """The chats of one rollout by number: those of an earlier producer, and those stored since."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._chats = {} if context.resume is None else chats_in(context.resume)

    def get(self, number: int, prompt_ids: tuple[int, ...]) -> SavedChat | None:
        """What was stored of chat `number`, if it began with this prompt."""
        saved = self._chats.get(number)
        if saved is None or tuple(saved.segments[0].token_ids) == prompt_ids:
            return saved
        self._context.log.warning("event=saved_chat_unused chat=%d reason=another_prompt", number)
        return None

    async def put(self, number: int, chat: SavedChat) -> None:
        """Store a chat together with the others of its rollout; raises SchemaError when they are too large or `state` cannot be encoded."""
        self._chats[number] = chat
        try:
            body = msgspec.msgpack.encode(self._chats)
        except (TypeError, OverflowError) as error:
            raise SchemaError(
                f"the state given to chat.save cannot be stored: {error}", hint="give it numbers, texts, lists, tables"
            ) from error
        if len(body) > MAX_BYTES:
            raise SchemaError(
                f"expected chats of at most {MAX_BYTES} bytes to save, got {len(body)}", hint="keep less in chat.save's state"
            )
        await self._context.checkpoint(_MARK + zlib.compress(body, 1))


def chats_in(data: bytes) -> dict[int, SavedChat]:
    """The chats of a checkpoint by number, none where it holds something else; raises SchemaError when it is damaged."""
    if not data.startswith(_MARK):
        return {}
    try:
        unpacking = zlib.decompressobj()
        body = unpacking.decompress(data[len(_MARK) :], MAX_BYTES)
        if not unpacking.eof:
            raise SchemaError(f"expected saved chats of at most {MAX_BYTES} bytes, got more, or only their beginning")
        chats = msgspec.msgpack.decode(body, type=dict[int, SavedChat])
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise SchemaError(f"expected saved chats in the rollout's checkpoint, got {len(data)} bytes that are none: {error}") from error
    return chats
