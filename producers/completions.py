"""An engine's chunks put together to completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing

import msgspec

from streamrl.engines.extras import BEGAN, CANDIDATES, EXPERTS, INEXACT, counters_of
from streamrl.engines.protocol import Chunk, Engine, GenerateRequest
from streamrl.errors import EngineError
from streamrl.producers.episode import Origin, Segment
from streamrl.producers.protocol import Tokenizer
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.tasks import Sampling


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
        """The tokens decoded, without the stop token, up to the first stop string."""
        return text_of(self.segment, self.finish_reason, tokenizer)


def text_of(segment: Segment, finish_reason: str, tokenizer: Tokenizer) -> str:
    """Text of a turn: its tokens decoded, without the stop token, up to the first of its stop strings."""
    ids, stops = segment.token_ids, () if segment.sampling is None else segment.sampling.stop
    if stops and finish_reason == "stop":
        text = tokenizer.decode(ids)
        if places := [at for stop in stops if (at := text.find(stop)) >= 0]:
            return text[: min(places)]
    return tokenizer.decode(ids[:-1] if finish_reason == "stop" else ids)


async def complete(engine: Engine, request: GenerateRequest) -> list[Completion]:
    """Run a request to its end: one completion per seed, in the order of the seeds.

    Raises:
        EngineError: the engine refused, went away, cut a completion short from outside, or left one unfinished.
    """
    found, error = await finished(engine, request)
    if error is not None:
        raise error
    return [found[index] for index in range(len(request.seeds))]


async def finished(engine: Engine, request: GenerateRequest) -> tuple[dict[int, Completion], EngineError | None]:
    """The completions of a request that came to their end, by their place among the seeds, and why the others did not."""
    chunks: list[list[Chunk]] = [[] for _ in request.seeds]
    ended_s = [0.0 for _ in request.seeds]
    asked_s = time.time()
    error: EngineError | None = None
    try:
        async with aclosing(engine.generate(request)) as stream:  # type: ignore[type-var]  # every adapter is an async generator
            async for chunk in stream:
                chunks[chunk.completion].append(chunk)
                ended_s[chunk.completion] = time.time()
    except EngineError as raised:
        error = raised
    found: dict[int, Completion] = {}
    for index, parts in enumerate(chunks):
        end = parts[-1].finish_reason if parts else None
        if end not in (None, "abort"):
            found[index] = _join(parts, request.sampling, asked_s, ended_s[index])
        elif error is None:
            error = EngineError(
                f"expected completion {index} of request {request.request_id} to end with stop or length, got {end or 'no end'}",
                hint="the engine is going away, or something else aborted the request",
                request=request.request_id,
            )
    return found, error


def _join(parts: Sequence[Chunk], sampling: Sampling, asked_s: float, finished_s: float) -> Completion:
    last = parts[-1]
    inexact = bool(last.extras.get(INEXACT))
    began_s, counters = last.extras.get(BEGAN, 0.0), counters_of(last.extras)
    origin = Origin(last.engine, last.finish_reason or "", asked_s, began_s, finished_s, counters)
    experts, candidates = last.extras.get(EXPERTS), last.extras.get(CANDIDATES)
    made = inexact, sampling.temperature, origin, experts, sampling, candidates
    if len(parts) == 1:
        segment = Segment(last.token_ids, last.logprobs, last.spans, *made)
    else:
        segment = Segment(
            tuple(token for part in parts for token in part.token_ids),
            tuple(logprob for part in parts for logprob in part.logprobs),
            tuple(span for part in parts for span in part.spans),
            *made,
        )
    return Completion(segment, last.finish_reason or "", last.logprob_mode, last.engine)
