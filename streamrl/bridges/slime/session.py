"""Engines as slime's hooks ask them: `post` to the router's `/generate`, with SGLang's words for question and answer.

No server is asked: a request goes to the run's engines as those of every producer do, and what they gave is kept for `sample.episode_of`.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

import msgspec

from streamrl.bridges.slime.flags import ROUTER_HOST
from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import SchemaError
from streamrl.producers.completions import Completion, complete
from streamrl.producers.protocol import Context
from streamrl.schemas.tasks import Sampling, turn_sampling

_IGNORED = frozenset({"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "sampling_seed", "n"})
"""Of `sampling_params`: how the text is written, which is said below, and the seed, which is the rollout's."""
_TAKEN = frozenset({"text", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "stream", "rid"})


class Request(NamedTuple):
    """A question of a rollout's and its answer."""

    prompt_ids: tuple[int, ...]
    completion: Completion


class Session:
    """What the hooks of one rollout, or of one task, ask.

    Args:
        context: of the rollout.
        evaluation: whether it is one of an evaluation.
    """

    def __init__(self, context: Context, *, evaluation: bool = False) -> None:
        self.context = context
        self.evaluation = evaluation
        self.asked: list[Request] = []
        """Those that were answered, in the order in which they were asked."""
        self._loop = asyncio.get_running_loop()
        self._num_asked = 0

    async def post(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """As SGLang answers `/generate`. From any thread and event loop.

        Raises:
            EngineError: engines stay away; let it pass: the rollout is then repeated.
            SchemaError: what no engine here takes.
        """
        if asyncio.get_running_loop() is self._loop:
            return await self._generate(payload)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._generate(payload), self._loop))

    async def _generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        if unknown := sorted(name for name, value in payload.items() if name not in _TAKEN and value):
            raise SchemaError(f"expected {', '.join(sorted(_TAKEN))} in a request to /generate, got {', '.join(unknown)}")
        if payload.get("stream"):
            raise SchemaError("expected a request to /generate without stream, got stream = true", hint="answers come whole")
        context, ids = self.context, self._ids(payload)
        sampling = self._sampling(payload.get("sampling_params") or {}, len(ids))
        if sampling is None:
            return _answer(ids, "", (), (), "length", "")
        number, self._num_asked = self._num_asked, self._num_asked + 1
        request = GenerateRequest(
            request_id=f"{context.task.index}.{context.rollout_index}-{uuid4().hex}",
            prompt_ids=ids,
            sampling=sampling,
            policy=context.task.policy,
            # The first request has the rollout's own seed, so one turn here equals the built-in producer.
            seeds=(rollout_seed(context.seed, number) if number else context.seed,),
            min_version=context.task.min_version,
            min_epoch=context.task.least.epoch,
            session=f"{context.task.index}.{context.rollout_index}",
        )
        [completion] = await complete(context.engine, request)
        self.asked.append(Request(ids, completion))
        segment = completion.segment
        trims = not (payload.get("sampling_params") or {}).get("no_stop_trim")
        text = completion.text(context.tokenizer) if trims else context.tokenizer.decode(segment.token_ids)
        versions = [span.version.number for span in segment.spans if span.version is not None]
        version = str(versions[-1]) if versions else ""
        return _answer(ids, text, segment.token_ids, segment.logprobs, completion.finish_reason, version)

    def _ids(self, payload: Mapping[str, Any]) -> tuple[int, ...]:
        given = payload.get("input_ids")
        if given is None and isinstance(text := payload.get("text"), str):
            given = self.context.tokenizer.encode(text)
        if not isinstance(given, Sequence) or not given or not all(isinstance(one, int) for one in given):
            raise SchemaError(
                f"expected input_ids, a list of token ids, or text in a request to /generate, got {given!r:.80}",
                hint="one prompt a request",
            )
        return tuple(given)

    def _sampling(self, said: Mapping[str, Any], length: int) -> Sampling | None:
        """How the answer is drawn; None where the longest sequence leaves no room for one."""
        if said.get("n") not in (None, 1):
            raise SchemaError(f"expected sampling_params.n = 1, got {said['n']!r}", hint="ask once for each answer")
        fields = {name: value for name, value in said.items() if name not in _IGNORED and value is not None}
        if isinstance(stop := fields.get("stop"), str):
            fields["stop"] = [stop]
        most = self.context.max_len
        wanted = fields.pop("max_new_tokens", self.context.task.sampling.max_new_tokens)
        wanted = min(wanted, most - length) if most else wanted
        if wanted < 1:
            return None
        drawn = self.context.drawn(turn_sampling(self.context.task.sampling, fields))
        return msgspec.structs.replace(drawn, max_new_tokens=wanted)


def _answer(
    prompt_ids: Sequence[int], text: str, ids: Sequence[int], logprobs: Sequence[float], finish_reason: str, version: str
) -> dict[str, Any]:
    return {
        "text": text,
        "output_ids": list(ids),
        "meta_info": {
            "finish_reason": {"type": finish_reason},
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": version,
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
        },
    }


_current: contextvars.ContextVar[Session | None] = contextvars.ContextVar("session", default=None)


@contextmanager
def running(session: Session) -> Generator[None]:
    """Code in this block, and what it starts, asks by this session."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Session:
    """Of the rollout that the running code belongs to."""
    if (session := _current.get()) is None:
        raise SchemaError("engines can be asked while a rollout is generated, not here", hint="ask in custom_generate_function_path")
    return session


async def post(url: str, payload: Mapping[str, Any], *_: Any, **__: Any) -> dict[str, Any]:
    """Slime's `post`, to the router's `/generate` and nowhere else."""
    parts = urlsplit(url)
    if parts.hostname != ROUTER_HOST or parts.path.rstrip("/") != "/generate":
        raise SchemaError(
            f"expected a request to http://args.sglang_router_ip:args.sglang_router_port/generate, got {url}",
            hint="other servers are asked with an HTTP client of your own, such as aiohttp",
        )
    return await current().post(payload)


def sampling_params(context: Context) -> dict[str, Any]:
    """What slime hands to a generate function: those of the task."""
    sampling = context.task.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
