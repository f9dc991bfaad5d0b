"""What the APIs of the gateway share: a call that has found its session, and an answer before it is put into an API's form."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from aiohttp import web

from streamrl.data.tool_calls import ParsedTurn
from streamrl.producers.gateway.errors import ApiError, refused
from streamrl.producers.gateway.messages import Given, digest_of
from streamrl.producers.gateway.placing import Place
from streamrl.producers.gateway.session import Ask, Session
from streamrl.producers.gateway.tree import Node, Tree

IGNORED = "X-StreamRL-Ignored"
"""Header of an answer: names of the fields of its call that have no effect."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request to a session."""

    session: Session
    body: Mapping[str, Any]
    key: str = ""
    """Its `Idempotency-Key`."""
    model: str
    """As the request calls it."""
    size: int = 0
    """Bytes of the request."""
    ignored: Sequence[str] = ()
    """Names of its fields that have no effect, though it may expect one."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {IGNORED: ", ".join(self.ignored)} if self.ignored else {}

    def flag(self, name: str) -> bool:
        """A field that is true or false; raises ApiError."""
        value = self.body.get(name)
        if value is not None and not isinstance(value, bool):
            raise refused(f"expected true or false, got {value!r:.80}", param=name)
        return bool(value)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A stored turn, as a call is answered with it."""

    identity: str
    created_s: int
    model: str
    says: ParsedTurn
    text: str
    prompt_ids: list[int]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    decode: Callable[[Sequence[int]], str]
    """Of the tokenizer."""

    @property
    def tokens(self) -> list[str]:
        """Text of each token."""
        return [self.decode((token,)) for token in self.token_ids]

    def usage(self) -> dict[str, int]:
        """As all of OpenAI's APIs have it."""
        prompt, completion = len(self.prompt_ids), len(self.token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def id_words(self) -> list[str]:
        """What each token is called where log-probs are to name ids."""
        return [f"token_id:{token}" for token in self.token_ids]


def ask(call: Call, kind: str, what: Any, place: Any, fields: Mapping[str, Any], *, where: str = "", tools: Any = None) -> Ask:
    """The call as its session takes it; `what` is the content that it asks about, of which `kind` says the form."""
    fields = dict(fields)
    seed = fields.pop("seed", None)
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise refused(f"expected a seed as a whole number, got {seed!r:.80}", param=where + "seed")
    placed: Any = place

    def checked(tree: Tree) -> Place:
        found: Place = placed(tree)
        return found

    request = digest_of([kind, what, fields, tools, seed])
    return Ask(place=checked, fields=fields, where=where, request=request, key=call.key, seed=seed, tools=tools, size=call.size)


async def answered(call: Call, asked: Ask, prefix: str, given: Given = "all calls") -> Answer:
    """Make the call; returns once its turn is stored."""
    session = call.session
    node = await session.call(asked)
    return answer_of(session, node, asked.tools, call.model, prefix, given)


def given_back(choice: Any, parallel: Any, where: str = "tool_choice") -> Given:
    """Read from `tool_choice` and `parallel_tool_calls` in which form the calls of a turn are given back; raises ApiError."""
    if parallel is not None and not isinstance(parallel, bool):
        raise refused(f"expected true or false, got {parallel!r:.80}", param="parallel_tool_calls")
    kind: Any = cast("Mapping[str, Any]", choice).get("type") if isinstance(choice, Mapping) else choice
    if kind is not None and not isinstance(kind, str):
        raise refused(f"expected auto, none, required or a tool, got {choice!r:.80}", param=where)
    if kind == "none":
        return "no calls"
    return "first call" if parallel is False else "all calls"


def replied(call: Call, answer: Any) -> web.Response:
    """An answer in its API's form, whole."""
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json", headers=call.headers)


def answer_of(session: Session, node: Node, tools: Any, model: str, prefix: str, given: Given) -> Answer:
    """A turn as an answer; the same again for the same turn."""
    turn = node.turn
    if turn is None:
        raise ApiError(500, "expected a turn, got a prompt")
    rendering = session.rules.rendering
    ids = node.token_ids()
    token_ids = turn.tokens.token_ids
    prompt_ids = ids[: len(ids) - len(token_ids)]
    identity = f"{session.name}.{node.number}"
    text = rendering.text(turn.tokens, turn.sampling)
    return Answer(
        identity=f"{prefix}-{identity}",
        created_s=int(turn.made_s or time.time()),
        model=model,
        says=rendering.parsed(text, tools or session.context.task.tools, prompt_ids, f"call_{identity}_", given=given),
        text=text,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=turn.tokens.token_logprobs,
        finish_reason=turn.tokens.finish_reason,
        decode=rendering.tokenizer.decode,
    )
