"""`/inference/v1/generate`: token ids in, token ids out, as training clients call vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from aiohttp import web

from streamrl.producers.gateway.completions import read_ids
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.fields import PARAMS, ignored, sampled
from streamrl.producers.gateway.front import Call, answered, ask, replied
from streamrl.producers.gateway.placing import by_tokens

_OUTSIDE = frozenset({"model", "token_ids", "sampling_params", "cache_salt", "priority", "request_id", "stream", "features"})
_WHERE = "sampling_params."


async def generate(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a call of token ids."""
    body = call.body
    for name, value in body.items():
        if value is not None and (name not in _OUTSIDE or (name in ("stream", "features") and value)):
            raise refused(f"expected no {name}, got {value!r:.80}", code="unsupported_parameter", param=name)
    ids = read_ids(body.get("token_ids"), "token_ids")
    params = body.get("sampling_params") or {}
    if not isinstance(params, Mapping):
        raise refused(f"expected sampling_params as a table, got {params!r:.80}", param="sampling_params")
    given = cast("Mapping[str, Any]", params)
    if given.get("logprobs") not in (None, True, 0, 1):
        raise refused(f"expected logprobs 1, got {given['logprobs']!r:.80}", code="unsupported_parameter", param=f"{_WHERE}logprobs")
    fields = sampled(given, PARAMS, _WHERE)
    call = replace(call, ignored=ignored(given, PARAMS))
    asked = ask(call, "generate", ids, by_tokens(ids, call.session.rules, param="token_ids"), fields, where=_WHERE)
    answer = await answered(call, asked, "generate")
    content = [{"token": word, "logprob": logprob} for word, logprob in zip(answer.id_words(), answer.logprobs, strict=True)]
    choice = {"index": 0, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason, "logprobs": {"content": content}}
    whole = {"request_id": answer.identity, "model": answer.model, "choices": [choice], "usage": answer.usage()}
    return replied(call, whole)
