"""The engine seam: token ids in, token ids out, with the version that sampled each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import msgspec

from streamrl.engines.lost import Lost
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.telemetry.clock import StateClock
from streamrl.weights.protocol import WeightHost


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`num_completions` independent completions of one prompt."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: Sampling = Sampling()
    policy: str = "policy"
    seeds: Sequence[int] = (0,)
    """One seed per completion, as many as completions are wanted.

    A deterministic engine gives equal tokens for equal seed, prompt and weights.
    """
    min_version: int = 0
    """The engine starts it only once it serves this version number or a later one of `min_epoch`, or any of a later epoch."""
    min_epoch: int = 0
    session: str = ""
    """Requests of one session prefer one engine (prefix cache)."""
    stream: bool = False
    """Give chunks as they are made instead of one at the end of each completion."""

    @property
    def least(self) -> Version:
        """The lowest version that it may be started with."""
        return Version(self.min_epoch, self.min_version)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one completion. The chunks of a completion concatenate to it."""

    completion: int
    """Index into the request's seeds."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log of the probability each token was drawn with, in the mode below."""
    spans: tuple[VersionSpan, ...]
    """Cover exactly this chunk's tokens; versions are never None."""
    finish_reason: str | None = None
    """`stop`, `length` or `abort` on a completion's last chunk, else None. A stop token is part of `token_ids`."""
    logprob_mode: LogprobMode = LogprobMode.SAMPLED
    engine: str = ""
    extras: dict[str, Any] = {}
    """More about a completion, on its last chunk: see `streamrl.engines.extras`."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and does now."""

    engine: str
    policy: str
    serving: Version | None
    running: int
    waiting: int
    slots: int
    max_len: int
    tokens_total: int = 0
    swaps_total: int = 0
    last_swap_ms: float = 0.0
    counters: dict[str, float] = {}
    """Further numbers by declared metric name: totals since the start where the metric's reduction is a sum, else the value now."""


class Engine(Protocol):
    """What a producer holds. Adapters: `local` and `table` in process, `http` for any server that speaks the SGLang subset."""

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Run the request; every completion ends with a chunk that has a finish_reason.

        Closing the iterator aborts what is unfinished. Raises EngineError when the engine refuses the request or goes away.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a request's unfinished completions (finish_reason `abort`); unknown ids are ignored."""
        ...

    async def info(self) -> EngineInfo: ...


class HostedEngine(Engine, WeightHost, Protocol):
    """An engine with its weights in one life, as the engine worker holds it. Adapters: `local`, `table` and `sglang`."""

    engine_id: str
    """Names it in chunks, logs and errors."""
    policy: str
    """The policy it serves."""
    detail: dict[str, Any]
    """What people may want to know about it once it runs."""
    lost: Lost
    """What it has sampled for nobody."""
    gpus: int
    """On which it computes; 0: on the CPU."""

    def timed(self, clock: StateClock) -> None:
        """Before the start: have `clock` enter the engine's states (`streamrl.telemetry.names.STATES`)."""
        ...

    async def start(self) -> None:
        """Once in its life; raises EngineError."""
        ...

    async def stop(self) -> None:
        """End it; open requests fail with EngineError. Ends also what never started."""
        ...
