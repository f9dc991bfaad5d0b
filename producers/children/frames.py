"""What a worker and its children say to each other: MessagePack with a length in front, over a pair of sockets.

A call is one piece of user code that runs: a rollout, a whole group (for class producers), or a reward of a group. The parent numbers
calls, the child numbers the completions that a call asks for, from 0: its *turns*.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl import errors
from streamrl.engines.protocol import Chunk, EngineInfo, GenerateRequest
from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.protocol import Failure
from streamrl.schemas.samples import Branch, Status
from streamrl.schemas.tasks import RolloutTask, Sampling

MAX_BYTES = 32 << 20
"""Largest frame that a child may send."""
_LENGTH = struct.Struct(">I")


class Told(msgspec.Struct, frozen=True, tag_field="frame"):
    """Base of what the parent says."""


class Hello(Told, frozen=True, kw_only=True):
    """The first frame: whose child it is and what user code it loads."""

    function: str = ""
    """The producer; empty: none."""
    function_key: str = ""
    """The configuration key that it came from, for messages."""
    reward: str = ""
    """The reward; empty: none."""
    reward_options: dict[str, Any] = {}
    reward_key: str = ""
    """`reward.key`."""
    by_row: dict[str, dict[str, Any]] | None = None
    """`data.reward_options`, where rows may name rewards of their own."""
    options: dict[str, Any] = {}
    """`producer.options`."""
    model_dir: str
    """Where the policy's tokenizer is."""
    max_len: int
    chat_template: bool
    template_kwargs: dict[str, Any] = {}
    tool_calls: str = "auto"
    memory_bytes: int
    """Most memory the child may have for data; 0: no limit."""


class Begin(msgspec.Struct, frozen=True):
    """One call of a producer."""

    call: int
    rollout: int | None
    """None: all rollouts of the task."""
    resumes: dict[int, bytes] = {}
    """Checkpoints by rollout."""
    turns: tuple[Segment, ...] = ()
    """What the parent has recorded for it before: turns 0, 1, ..."""


class RollOut(Told, frozen=True):
    """Begin calls of one task."""

    task: RolloutTask
    begins: tuple[Begin, ...]


class Score(Told, frozen=True):
    """Begin a call of the reward."""

    call: int
    task: RolloutTask
    episodes: tuple[Episode, ...]


class Cancel(Told, frozen=True):
    """End a call; whatever it gives is ignored."""

    call: int


class Problem(msgspec.Struct, frozen=True):
    """An error of streamrl on its way to or from user code."""

    kind: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: errors.StreamRLError) -> Problem:
        """To be raised again on the other side."""
        return cls(type(error).__name__, error.message, error.hint)

    def error(self) -> errors.StreamRLError:
        """What came from the other side; of a class that is not known here, an EngineError."""
        kind: type[errors.StreamRLError] = getattr(errors, self.kind, errors.EngineError)
        return kind(self.message, hint=self.hint)


class Given(Told, frozen=True):
    """News of a request: a chunk, an error, or (neither) its end."""

    call: int
    turn: int
    """The request's first turn."""
    chunk: Chunk | None = None
    problem: Problem | None = None


class Answer(Told, frozen=True):
    """Of a `Save`, `Abort`, `Info` or `Look`."""

    call: int
    number: int
    problem: Problem | None = None
    info: EngineInfo | None = None
    image: bytes | None = None


class Ping(Told, frozen=True):
    """To be answered by the child's event loop."""

    number: int


class Said(msgspec.Struct, frozen=True, tag_field="frame"):
    """Base of what a child says."""


class Ready(Said, frozen=True):
    """The user's code is loaded."""

    by_rollout: bool
    """Whether the producer is called once per rollout."""
    by_episode: bool = False
    """Whether the reward is called once per episode."""
    plain: bool = False
    """Whether it runs in the main thread, one call at a time."""


class Broken(Said, frozen=True):
    """The user's code cannot be loaded."""

    problem: Problem
    key: str


class Began(Said, frozen=True):
    """A call's user code runs from now on."""

    call: int


class Waits(Said, frozen=True):
    """A program of the call has begun to wait for a slot of the sandbox, or waits no longer."""

    call: int
    begins: bool


class Ask(Said, frozen=True):
    """A request to an engine; its completions are the turns from `turn` on."""

    call: int
    turn: int
    request: GenerateRequest


class Hush(Said, frozen=True):
    """What is left of a request is not wanted."""

    call: int
    turn: int


class Save(Said, frozen=True):
    """A rollout's checkpoint."""

    call: int
    number: int
    rollout: int
    data: bytes


class Abort(Said, frozen=True):
    """`Engine.abort`."""

    call: int
    number: int
    request_id: str


class Info(Said, frozen=True):
    """`Engine.info`."""

    call: int
    number: int


class Look(Said, frozen=True):
    """For an image of the task's row."""

    call: int
    number: int
    place: int


class Piece(msgspec.Struct, frozen=True):
    """A segment of an episode: the environment's tokens, or parts (turn, start, stop) of turns."""

    token_ids: tuple[int, ...] = ()
    turns: tuple[tuple[int, int, int], ...] = ()


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """An episode without what the parent knows by itself."""

    rollout: int
    pieces: tuple[Piece, ...]
    finish_reason: str
    status: Status
    texts: tuple[str, ...]
    sampling: Sampling
    seed: int
    reward: float | None
    agent: str = ""
    reward_parts: dict[str, float]
    metadata: bytes
    """JSON, as it will be stored."""
    branch: Branch | None = None
    started_s: float
    finished_s: float


class Ended(Said, frozen=True, kw_only=True):
    """A producer's call is over: what it gave, or the engine's error that ended it."""

    call: int
    given: tuple[Returned, ...] = ()
    failures: tuple[Failure, ...] = ()
    problem: Problem | None = None


class Value(msgspec.Struct, frozen=True):
    """An episode's reward, or why it has none."""

    value: float = 0.0
    parts: dict[str, float] = {}
    error: str = ""


class Scored(Said, frozen=True):
    """A reward's call is over."""

    call: int
    values: tuple[Value, ...] = ()
    error: str = ""
    """Why none of them has one."""
    worn: bool = False
    """The process is to be replaced: calls have left threads, processes or memory behind."""


class Faulty(Said, frozen=True):
    """User code has broken the process, so that calls may fail that are not to blame; or it has cancelled what is another call's."""

    why: str
    ended: Ended | Scored | None = None
    """The end of a call that may not be to blame for it; None: none has."""
    culprit: int | None = None
    """The call that has done it; None: not known."""


class Pong(Said, frozen=True):
    """The event loop turns, and a canary call in it did what it should."""

    number: int


class Held(Said, frozen=True):
    """The event loop has not turned for a second: this is who holds it now."""

    call: int | None
    step: int
    """Another number: somebody else does, so that it moves on, if slowly."""
    place: str
    """File, line and function."""


class Slow(Said, frozen=True):
    """Blocking calls have taken much of the loop's time."""

    place: str
    seconds: float
    """Within the last `watchdog.WINDOW_S`."""


class Line(Said, frozen=True):
    """A line for the worker's log."""

    logger: str
    level: int
    text: str
    traceback: str = ""


Down = Hello | RollOut | Score | Cancel | Given | Answer | Ping
OfCall = Began | Waits | Ask | Hush | Save | Abort | Info | Look | Ended | Scored
Up = Ready | Broken | OfCall | Faulty | Pong | Held | Slow | Line

_encoder = msgspec.msgpack.Encoder()
down_decoder = msgspec.msgpack.Decoder(Down)
up_decoder = msgspec.msgpack.Decoder(Up)


def packed(frame: Told | Said) -> bytes:
    """A frame as it goes over the socket; raises TypeError, OverflowError or UnicodeEncodeError for values that cannot be written."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def checked(frame: Said) -> bytes:
    """A child's frame as it goes over the socket; raises SchemaError when the parent could not read it, or would not take it."""
    try:
        data = packed(frame)
        up_decoder.decode(memoryview(data)[_LENGTH.size :])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:  # UnicodeEncodeError is a ValueError
        raise SchemaError(f"it cannot be handed over: {error}") from error
    if len(data) - _LENGTH.size > MAX_BYTES:
        raise SchemaError(f"it has {len(data)} bytes, at most {MAX_BYTES} can be handed over")
    return data


class Frames:
    """Bytes as they come to the bodies of frames.

    Args:
        max_bytes: largest frame that is taken; 0: any.
    """

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """The frames that are complete now; raises SchemaError as soon as one is announced that is too large."""
        self._buffer += data
        start, end = 0, len(self._buffer)
        while end - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if self._max_bytes and length > self._max_bytes:
                raise SchemaError(f"a child's frame may have {self._max_bytes} bytes, got one of {length}")
            if end - start - _LENGTH.size < length:
                break
            start += _LENGTH.size
            yield bytes(self._buffer[start : start + length])
            start += length
        del self._buffer[:start]
