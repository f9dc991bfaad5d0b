"""An engine that writes given texts, for producers whose model must say something in particular."""

import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any

from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.protocol import Context
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version


class Scripted:
    """The `generate` of an engine: each request gets the next text, its last token being the one that ends a turn."""

    def __init__(self, tokenizer: Tokenizer, texts: Iterable[str]) -> None:
        self._tokenizer = tokenizer
        self._texts = iter(texts)
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        self.asked.append(request)
        ids = (*self._tokenizer.encode(next(self._texts)), self._tokenizer.stop_ids[0])
        cut = ids[: request.sampling.max_new_tokens]
        version = Version(0, len(self.asked))
        logprobs = tuple(-0.01 * (place + len(self.asked)) for place in range(len(cut)))
        reason = "stop" if len(cut) == len(ids) else "length"
        yield Chunk(
            completion=0, token_ids=cut, logprobs=logprobs, spans=(VersionSpan(len(cut), version),), finish_reason=reason, engine="e"
        )


def rollout_engine(tokenizer: Tokenizer, texts: Iterable[str], *, tools: Any = None, prompt: Any = "2+3?", **context: Any) -> RolloutEngine:
    """The engine of one rollout, whose model writes these texts; `engine.context.task` is its task."""
    format = ChatFormat(tokenizer, chat_template=True)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    prompt_ids = tuple(format.prompt(messages, tools, context.get("template_kwargs")))
    sampling = Sampling(max_new_tokens=500)
    task = RolloutTask(
        run="r", index=3, source="main", prompt=prompt, prompt_ids=prompt_ids, tools=tools, sampling=sampling, num_rollouts=1
    )
    engine: Any = Scripted(tokenizer, texts)
    given = Context(engine=engine, tokenizer=tokenizer, task=task, seed=5, log=logging.getLogger("test"), **context)
    return RolloutEngine(given, format)
