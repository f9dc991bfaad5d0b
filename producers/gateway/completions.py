"""`/v1/completions`: a text, or token ids, and what the model writes behind it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from aiohttp import web

from streamrl.producers.gateway.chat_completions import token_places
from streamrl.producers.gateway.errors import refused
from streamrl.producers.gateway.fields import COMPLETIONS, sampled
from streamrl.producers.gateway.front import Answer, Call, answered, ask, replied
from streamrl.producers.gateway.placing import by_text, by_tokens
from streamrl.producers.gateway.sampling import MAX_TOKEN
from streamrl.producers.gateway.sse import pieces, stream


async def completions(call: Call, request: web.Request) -> web.StreamResponse:
    """Answer a call of text or token ids."""
    prompt, rules = call.body.get("prompt"), call.session.rules
    fields = sampled(call.body, COMPLETIONS)
    logprobs = call.body.get("logprobs")
    if logprobs not in (None, False, True, 0, 1):
        raise refused(f"expected logprobs of at most 1, got {logprobs!r:.80}", code="unsupported_parameter", param="logprobs")
    place = (
        by_text(prompt, rules, param="prompt") if isinstance(prompt, str) else by_tokens(read_ids(prompt, "prompt"), rules, param="prompt")
    )
    answer = await answered(call, ask(call, "text", prompt, place, fields), "cmpl")
    if call.flag("stream"):
        return await stream(request, _events(call, answer), headers=call.headers)
    return replied(call, _whole(call, answer))


def read_ids(given: Any, param: str) -> list[int]:
    """Token ids; raises ApiError."""
    items = cast("list[Any]", given) if isinstance(given, list) else []
    if not items:
        raise refused(f"expected token ids, at least one, got {given!r:.80}", param=param)
    wrong = next((one for one in items if type(one) is not int or not 0 <= one <= MAX_TOKEN), None)
    if wrong is not None:
        raise refused(f"expected token ids of one prompt, got {wrong!r:.80} among them", param=param)
    return items


def _logprobs(call: Call, answer: Answer) -> dict[str, Any] | None:
    if call.body.get("logprobs") in (None, False):
        return None
    texts = answer.tokens
    words = answer.id_words() if call.flag("return_tokens_as_token_ids") else texts
    places = [0]
    for text in texts:
        places.append(places[-1] + len(text))
    return {"tokens": words, "token_logprobs": answer.logprobs, "top_logprobs": None, "text_offset": places[:-1]}


def _head(answer: Answer) -> dict[str, Any]:
    return {"id": answer.identity, "object": "text_completion", "created": answer.created_s, "model": answer.model}


def _whole(call: Call, answer: Answer) -> dict[str, Any]:
    top, beside = token_places(call, answer)
    choice = {"index": 0, "text": answer.text, "logprobs": _logprobs(call, answer), "finish_reason": answer.finish_reason, **beside}
    return _head(answer) | {"choices": [choice], "usage": answer.usage(), **top}


def _events(call: Call, answer: Answer) -> Iterator[dict[str, Any]]:
    top, beside = token_places(call, answer)
    options: Any = call.body.get("stream_options") or {}
    for piece in pieces(answer.text):
        yield _head(answer) | {"choices": [{"index": 0, "text": piece, "logprobs": None, "finish_reason": None}]}
    last = {"index": 0, "text": "", "logprobs": _logprobs(call, answer), "finish_reason": answer.finish_reason, **beside}
    yield _head(answer) | {"choices": [last], **top}
    if isinstance(options, dict) and cast("dict[str, Any]", options).get("include_usage"):
        yield _head(answer) | {"choices": [], "usage": answer.usage()}
