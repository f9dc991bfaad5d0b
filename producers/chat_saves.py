"""Chats as a rollout's checkpoint: what `chat.save()` stores and `engine.chat(task)` goes on from, token for token."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.branches import Lineage
from streamrl.producers.episode import Segment
from streamrl.producers.protocol import Context
from streamrl.producers.turns import Turn
from streamrl.schemas.samples import LogprobMode

MAX_BYTES = 64 << 20
"""Of the chats of a rollout before they are compressed. What is stored is bounded too, but 1 MiB may unpack to a thousand times that."""
_MARK = b"streamrl-chats-1\n"
"""Begins a checkpoint of chats; user code that stores its own bytes has another beginning."""


class SavedChat(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a chat but what the producer gives again: tokenizer, sampling, format."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    finish_reason: str
    mode: LogprobMode
    engine: str
    started_s: float
    lineage: Lineage = ()
    """Empty in what earlier versions stored, where no chat could leave another."""
    state: Any = None
    """The producer's own."""


class ChatSaves:
    """The chats of one rollout by number: those of an earlier producer, and those stored since."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._chats = {} if context.resume is None else chats_in(context.resume)

    def get(self, number: int, lineage: Lineage, begun: Sequence[Segment]) -> SavedChat | None:
        """What was stored of chat `number`, if it began with this prompt, or as a branch of the same chat with tokens that this one has.

        Args:
            number: of the chat within its rollout.
            lineage: of the chat.
            begun: its prompt; of a branch, all that its parent has now.
        """
        saved = self._chats.get(number)
        if saved is None:
            return None
        of_branch = len(saved.lineage) > 1
        shared = saved.lineage[-1][1] if of_branch else len(saved.segments[0].token_ids)
        begins = _tokens(begun) if of_branch else tuple(begun[0].token_ids)
        same_place = [chat for chat, _ in saved.lineage[:-1]] == [chat for chat, _ in lineage[:-1]]
        if same_place and (of_branch or shared == len(begins)) and _tokens(saved.segments)[:shared] == begins[:shared]:
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


def _tokens(segments: Sequence[Segment]) -> tuple[int, ...]:
    return tuple(token for segment in segments for token in segment.token_ids)


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
