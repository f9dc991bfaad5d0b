"""An engine's chunks put together to completions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from streamrl.engines.extras import INEXACT
from streamrl.engines.protocol import Chunk, Engine, GenerateRequest
from streamrl.errors import EngineError
from streamrl.producers.episode import Segment
from streamrl.producers.protocol import Tokenizer
from streamrl.schemas.samples import LogprobMode


class Completion(msgspec.Struct, frozen=True):
    """What the model sampled for one seed, exactly as the engine gave it."""

    segment: Segment
    finish_reason: str
    logprob_mode: LogprobMode
    engine: str

    @property
    def token_ids(self) -> Sequence[int]:
        """The sampled tokens; a stop token is the last of them."""
        return self.segment.token_ids

    def text(self, tokenizer: Tokenizer) -> str:
        """The tokens decoded, without the stop token."""
        ids = self.segment.token_ids
        return tokenizer.decode(ids[:-1] if self.finish_reason == "stop" else ids)


async def complete(engine: Engine, request: GenerateRequest) -> list[Completion]:
    """Run a request to its end: one completion per seed, in the order of the seeds.

    Raises:
        EngineError: the engine refused, went away, cut a completion short from outside, or left one unfinished.
    """
    chunks: list[list[Chunk]] = [[] for _ in request.seeds]
    async with aclosing(engine.generate(request)) as stream:  # type: ignore[type-var]  # every adapter is an async generator
        async for chunk in stream:
            chunks[chunk.completion].append(chunk)
    return [_join(parts, request, index) for index, parts in enumerate(chunks)]


def _join(parts: Sequence[Chunk], request: GenerateRequest, index: int) -> Completion:
    if not parts or parts[-1].finish_reason in (None, "abort"):
        got = "abort" if parts and parts[-1].finish_reason else "no end"
        raise EngineError(
            f"expected completion {index} of request {request.request_id} to end with stop or length, got {got}",
            hint="the engine is going away, or something else aborted the request",
            request=request.request_id,
        )
    last = parts[-1]
    inexact, temperature = bool(last.extras.get(INEXACT)), request.sampling.temperature
    if len(parts) == 1:
        segment = Segment(last.token_ids, last.logprobs, last.spans, inexact, temperature)
    else:
        segment = Segment(
            tuple(token for part in parts for token in part.token_ids),
            tuple(logprob for part in parts for logprob in part.logprobs),
            tuple(span for part in parts for span in part.spans),
            inexact,
            temperature,
        )
    return Completion(segment, last.finish_reason or "", last.logprob_mode, last.engine)
