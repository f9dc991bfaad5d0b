"""A prompt sent to a live engine of a run that is up, as a producer would send it."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import msgspec

from streamrl.data.problems import Unusable
from streamrl.data.streamed import open_task_rows
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import ConfigError, DataError, EngineError
from streamrl.history.source import Source
from streamrl.history.trace_text import printable
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.completions import complete
from streamrl.producers.engine_pool import EnginePool
from streamrl.schemas.control import ROLLOUT_ROLE

FIND_S = 10.0
"""How long a live engine is looked for."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine gave for a prompt."""

    prompt: str
    prompt_tokens: int
    answer: str
    tokens: tuple[int, ...]
    logprob_sum: float
    """Natural log of the probability that this answer was drawn with."""
    versions: dict[str, int]
    """Tokens by the version that sampled them."""
    finish_reason: str
    engine: str
    took_s: float


def prompt_ids(source: Source, tokenizer: Tokenizer, text: str | None, row: int | None) -> Sequence[int]:
    """The tokens of a text, or of a row of the run's data (numbered as its tasks number them).

    Raises:
        ConfigError: there is no such row, or the text has no token.
        DataError: the data cannot be read, or the row cannot be used.
    """
    config = source.config
    if row is not None:
        with tempfile.TemporaryDirectory() as kept:
            problems = open_task_rows(config, tokenizer, Path(kept))
        if not 0 <= row < len(problems):
            raise ConfigError(f"expected --row from 0 to {len(problems) - 1} of {config.data.train}, got {row}", hint="count from 0")
        [found] = problems.take([row])
        if isinstance(found, Unusable):
            raise DataError(found.detail, hint="name another row", row=row)
        return found.prompt_ids
    found = ChatFormat(tokenizer, chat_template=config.data.chat_template).text_prompt(text or "")
    if not found:
        raise ConfigError("expected a prompt of at least one token, got none", hint="write --prompt 'some text'")
    return found


async def ask(source: Source, tokenizer: Tokenizer, ids: Sequence[int], *, seed: int) -> Answer:
    """One completion with the run's sampling.

    Raises:
        ConfigError: it is a recording; the engines' token cannot be read.
        EngineError: no engine is there, or it refuses.
    """
    if source.bus is None or source.run is None:
        raise ConfigError("expected a run that is up, got a recording, which has no engines", hint="name the run")
    token = source.run.engine_token()
    pool = EnginePool(source.bus.kv, lambda presence: ChannelEngine(presence.address, token=token), role=ROLLOUT_ROLE)
    request = GenerateRequest(request_id=f"inspect-{uuid4().hex}", prompt_ids=tuple(ids), sampling=source.config.sampling, seeds=(seed,))
    following = asyncio.create_task(pool.run())
    try:
        began = time.monotonic()
        while not any(presence.serving is not None for presence in pool.engines.values()):
            if time.monotonic() - began > FIND_S:
                raise EngineError(
                    f"expected an engine of run {source.run.name!r} that serves a version, found none within {FIND_S:g} s",
                    hint=f"`streamrl status {source.run.name}` says what its engines do",
                )
            await asyncio.sleep(0.05)
        began = time.monotonic()
        [found] = await complete(pool, request)
        took_s = time.monotonic() - began
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    versions: dict[str, int] = {}
    for span in found.segment.spans:
        versions[str(span.version)] = versions.get(str(span.version), 0) + span.length
    return Answer(
        prompt=tokenizer.decode(ids),
        prompt_tokens=len(ids),
        answer=found.text(tokenizer),
        tokens=tuple(found.token_ids),
        logprob_sum=float(sum(found.segment.logprobs)),
        versions=versions,
        finish_reason=found.finish_reason,
        engine=found.engine,
        took_s=took_s,
    )


def answer_text(found: Answer) -> str:
    """The answer, and under it what is known of it."""
    versions = ", ".join(f"{count} of version {version}" for version, count in found.versions.items())
    return "\n".join(
        [
            printable(found.answer, lines=True),
            "",
            f"{len(found.tokens)} tokens ({versions or 'none'}), {found.finish_reason}, log-prob {found.logprob_sum:.4f}",
            f"by {found.engine} in {found.took_s:.3f} s, for a prompt of {found.prompt_tokens} tokens",
        ]
    )
