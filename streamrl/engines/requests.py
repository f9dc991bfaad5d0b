"""One request inside an engine: what is checked before it is taken, and the records that follow it through the decode loop."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum

from streamrl.engines.batching.edits import Editor
from streamrl.engines.handover import Handover
from streamrl.engines.lost import Lost
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import EngineError

MAX_WAITING = 1 << 16
"""Completions that may wait at one engine."""


class Stage(Enum):
    """Where a completion is."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Completion:
    """One completion of a request; owned by the decode thread once submitted."""

    __slots__ = ("began_s", "editor", "index", "job", "row", "sent", "stage")

    def __init__(self, job: Job, index: int, editor: Editor | None) -> None:
        self.job = job
        self.index = index
        self.editor = editor
        self.stage = Stage.WAITING
        self.row = -1
        """Row of the batch while RUNNING."""
        self.sent = 0
        """Tokens handed back so far (streaming)."""
        self.began_s = 0.0
        """Unix seconds at which it joined the batch."""


class Job:
    """One request with the queue its chunks are handed back through, which belongs to the event loop."""

    __slots__ = ("completions", "limit", "prompt", "queue", "request", "seeds", "stops")

    def __init__(
        self, request: GenerateRequest, *, eos_ids: tuple[int, ...], max_len: int, lost: Lost, editors: Sequence[Editor | None]
    ) -> None:
        self.request = request
        self.prompt = tuple(request.prompt_ids)
        sampling = request.sampling
        self.stops = sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids + eos_ids
        self.limit = min(sampling.max_new_tokens, max_len - len(self.prompt))
        """Most new tokens: asked for, and what fits in `max_len`."""
        self.seeds = tuple(seed & 0xFFFFFFFFFFFFFFFF for seed in request.seeds)
        self.queue = Handover(len(self.seeds), stream=request.stream, lost=lost)
        self.completions = tuple(Completion(self, index, editor) for index, editor in enumerate(editors))


def check_request(request: GenerateRequest, *, engine: str, policy: str, vocab_size: int, max_len: int) -> None:
    """Refuse what an engine cannot run.

    Raises:
        EngineError: another policy, an empty or too long prompt, a token outside the vocabulary, in a logit bias too, no seeds.
    """
    prompt = request.prompt_ids
    where = f"request {request.request_id!r} to engine {engine}"
    if not request.request_id:
        raise EngineError(f"expected a request id, got an empty one, at engine {engine}", hint="give every request its own id")
    if request.policy != policy:
        raise EngineError(f"expected policy {policy!r}, got {request.policy!r} in {where}", hint="ask an engine that serves this policy")
    if not request.seeds:
        raise EngineError(f"expected one seed per completion, got none in {where}", hint="give at least one seed")
    if not prompt:
        raise EngineError(f"expected at least one prompt token, got none in {where}", hint="begin the prompt with a special token")
    if len(prompt) >= max_len:
        raise EngineError(
            f"expected a prompt of at most {max_len - 1} tokens, got {len(prompt)} in {where}",
            hint="shorten the prompt, or raise model.max_len",
        )
    low, high = min(prompt), max(prompt)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise EngineError(
            f"expected token ids in 0 .. {vocab_size - 1}, got {bad} in {where}",
            hint="was the prompt made with the tokenizer of another model?",
        )
    if (bias := request.sampling.logit_bias) and max(bias) >= vocab_size:
        raise EngineError(
            f"expected token ids in 0 .. {vocab_size - 1} in sampling.logit_bias, got {max(bias)} in {where}",
            hint="was the bias made for the tokenizer of another model?",
        )


def check_room(request: GenerateRequest, *, engine: str, running: Container[str], waiting: int) -> None:
    """Refuse what an engine cannot take at this moment.

    Raises:
        EngineError: the request's id is among the `running` ones, or too many completions are `waiting` already.
    """
    if request.request_id in running:
        raise EngineError(
            f"expected a new request id, got {request.request_id!r}, which is running at engine {engine}",
            hint="give every request its own id",
        )
    if waiting + len(request.seeds) > MAX_WAITING:
        raise EngineError(
            f"expected at most {MAX_WAITING} waiting completions at engine {engine}, got one request more",
            hint="lower producer.concurrency, or start more engines",
        )
