"""The one table of the fields of requests: each is taken, ignored or refused. docs/gateway.md shows it.

A null is a field that was left out, whatever its name. Other fields of sampling are not here: `streamrl.producers.gateway.sampling` takes
those of `Sampling`, and refuses every name that neither it nor this table knows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import msgspec

from streamrl.producers.gateway.errors import ApiError, refused

Verdict = Literal["taken", "ignored", "refused"]


class Field(msgspec.Struct, frozen=True, kw_only=True):
    """The decision on one field."""

    verdict: Verdict
    note: str
    """A line for the documentation: what the field does, or why it does nothing. It is the hint of the error where the field is refused."""
    neutral: tuple[Any, ...] = ()
    """Values that change nothing: they are never refused, nor counted among what was ignored."""
    is_idle: Callable[[Any], bool] | None = None
    """A test of a field that is taken: true for values at which it has no effect, though its caller may expect one."""
    is_drawn: bool = False
    """True for a field of sampling."""

    def allows(self, value: Any) -> bool:
        """Return whether a request may have this value."""
        return self.verdict != "refused" or value in self.neutral

    def drops(self, value: Any) -> bool:
        """Return whether the caller is told that this value was ignored."""
        if self.is_idle is not None:
            return self.is_idle(value)
        return self.verdict == "ignored" and value not in self.neutral


Fields = Mapping[str, Field]
"""Decisions by the name of the field."""


def _taken(note: str, is_idle: Callable[[Any], bool] | None = None) -> Field:
    return Field(verdict="taken", note=note, is_idle=is_idle)


def _ignored(note: str, *neutral: Any) -> Field:
    return Field(verdict="ignored", note=note, neutral=neutral)


def _refused(note: str, *neutral: Any) -> Field:
    return Field(verdict="refused", note=note, neutral=neutral)


def _forces(choice: Any) -> bool:
    """Return whether a `tool_choice` asks for a call, which no engine here can be held to."""
    kind: Any = cast("Mapping[str, Any]", choice).get("type") if isinstance(choice, Mapping) else choice
    return kind not in ("auto", "none")


def _has(name: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, Mapping) and cast("Mapping[str, Any]", value).get(name) is not None


_THINKING = "`data.chat_template_kwargs` of the run decides how the model thinks"
_NO_TOKEN = Field(verdict="taken", note="changes no token")
_TEMPLATE = "the run's chat template begins and ends the turns"
_HOSTED = "nothing runs here: give functions, which the agent runs itself"

_TEMPERATURE: Fields = {
    "temperature": Field(
        verdict="taken",
        note="as in [sampling](sampling.md). At 0 the task's own is taken: a greedy token has no log-prob to train on",
        is_idle=lambda value: value == 0,
        is_drawn=True,
    )
}
_BOOKS: Fields = dict.fromkeys(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("prompt_cache_options", "cache_salt", "priority", "request_id", "prediction"),
    ),
    _NO_TOKEN,
)
_STREAM: Fields = {"stream": _taken("events made from the stored turn"), "stream_options": _taken("`include_usage`")}
_TOKENS: Fields = {
    "return_token_ids": _taken("token ids in the answer"),
    "return_tokens_as_token_ids": _taken("log-probs call a token `token_id:5`"),
}
PARAMS: Fields = {
    **_TEMPERATURE,
    "n": _refused("make several calls, each with an `Idempotency-Key` of its own", 1),
    "best_of": _refused("make several calls", 1),
    "use_beam_search": _refused("tokens are sampled", False),
    "top_a": _refused("engines do not draw by it", 0),
    "min_tokens": _refused("engines do not draw by it", 0),
    "truncate_prompt_tokens": _refused("shorten the conversation", -1),
    "skip_special_tokens": _refused("answers have the text of all tokens but the one that ends the turn", False),
    "spaces_between_special_tokens": _refused("answers have the text of all tokens but the one that ends the turn", True),
    "include_stop_str_in_output": _refused("leave it out", False),
    "no_stop_trim": _refused("leave it out", False),
    "detokenize": _refused("leave it out", True),
    "prompt_logprobs": _refused("only sampled tokens have log-probs", False, 0),
    "logprobs": _taken("log-probs of the sampled tokens"),
    "top_logprobs": _refused("engines keep the log-prob of the sampled token alone", 0),
    "routed_experts_prompt_start": _NO_TOKEN,
}
"""Fields of `sampling_params` of `/inference/v1/generate`, and of the APIs that have them beside the rest."""
_CALLS: Fields = {
    "tool_choice": _taken(
        "`auto`; `none` gives calls back as text. `required` and a tool by name count as `auto`: the model chooses, and may call nothing",
        _forces,
    ),
    "parallel_tool_calls": _taken("`false` gives back the first call of a turn only; its tokens keep all"),
}
_VLLM: Fields = {
    "chat_template_kwargs": _taken("at the values that the task has; others are refused, since prompts are the run's"),
    "continue_final_message": _refused("a turn of the model is not continued", False),
    "add_generation_prompt": _refused(_TEMPLATE, True),
    "add_special_tokens": _refused(_TEMPLATE, False),
    "chat_template": _refused(_TEMPLATE),
    "documents": _refused("put them into a message", []),
    "include_reasoning": _refused("thoughts are always in `reasoning_content`", True),
    "separate_reasoning": _refused("thoughts are always in `reasoning_content`", True),
    "stream_reasoning": _ignored("a streamed turn is whole before its first event", True, False),
    "parallel_thinking": _refused("leave it out", False),
}
CHAT: Fields = {
    "model": _taken("the policy, or the run's name"),
    "messages": _taken("the conversation. A last message of the assistant is refused: a turn of the model is not continued"),
    "tools": _taken("functions; `strict` is left out"),
    **_CALLS,
    "response_format": _taken("`text`, `json_object`, `json_schema`, where the run can draw by them"),
    **_STREAM,
    **PARAMS,
    **_TOKENS,
    **_BOOKS,
    "reasoning_effort": _ignored(_THINKING),
    "reasoning": _ignored(_THINKING, {}),
    "thinking": _ignored(_THINKING),
    "verbosity": _ignored("the policy has no such switch"),
    **_VLLM,
    "modalities": _refused("the policy writes text", ["text"]),
    "audio": _refused("the policy writes text"),
    "web_search_options": _refused(_HOSTED),
    "functions": _refused("give `tools`", []),
    "function_call": _refused("give `tool_choice`", "auto", "none"),
}
"""Fields of `/v1/chat/completions`."""
COMPLETIONS: Fields = {
    "model": _taken("the policy, or the run's name"),
    "prompt": _taken("a text, or token ids"),
    **_STREAM,
    **PARAMS,
    **_TOKENS,
    **_BOOKS,
    "echo": _refused("leave it out", False),
    "suffix": _refused("leave it out", ""),
    "add_special_tokens": _refused(_TEMPLATE, False),
}
"""Fields of `/v1/completions`."""
MESSAGES: Fields = {
    "model": _taken("the policy, or the run's name"),
    "messages": _taken("the conversation. A last message of the assistant is refused: a turn of the model is not continued"),
    "system": _taken("a text, or blocks of text"),
    "tools": _taken("tools of the caller's own; those that Anthropic runs are refused"),
    "tool_choice": _taken(
        "`auto`; `none` gives calls back as text; `any` and `tool` count as `auto`. `disable_parallel_tool_use` gives back the first call",
        _forces,
    ),
    "max_tokens": _taken("as in [sampling](sampling.md); it must be there"),
    "stop_sequences": _taken("strings that end a turn"),
    "stream": _taken("events made from the stored turn"),
    **_TEMPERATURE,
    **_BOOKS,
    "thinking": _ignored(f"{_THINKING}, and no budget is held to", {"type": "disabled"}),
    "output_config": _taken("`format` as `response_format`; its `effort` is ignored", _has("effort")),
    "output_format": _taken("as `response_format`"),
    "context_management": _ignored("the conversation is what the agent sends; nothing is cleared from it", {"edits": []}),
    "cache_control": _NO_TOKEN,
    "betas": _ignored("as the header `anthropic-beta`", []),
    "inference_geo": _NO_TOKEN,
    "speed": _NO_TOKEN,
    "mcp_servers": _refused(_HOSTED, []),
    "container": _refused(_HOSTED),
}
"""Fields of `/v1/messages` and `/v1/messages/count_tokens`."""
RESPONSES: Fields = {
    "model": _taken("the policy, or the run's name"),
    "input": _taken("a text, or items"),
    "instructions": _taken("the system message"),
    "tools": _taken("functions; hosted tools (`web_search`, `mcp` and others) are refused: nothing runs here"),
    **_CALLS,
    "max_output_tokens": _taken("as `max_tokens`"),
    "text": _taken("`format` as `response_format`; its `verbosity` is ignored", _has("verbosity")),
    "stream": _taken("events made from the stored turn"),
    "stream_options": _ignored("nothing is obfuscated", {}, {"include_obfuscation": False}),
    **_TEMPERATURE,
    "top_logprobs": PARAMS["top_logprobs"],
    **_BOOKS,
    "reasoning": _ignored(_THINKING, {}),
    "include": _taken("of encrypted thoughts, and of what hosted tools do, is ignored; `message.output_text.logprobs` is refused"),
    "truncation": _ignored("nothing is left out of a conversation: one that is too long is refused", "disabled"),
    "context_management": _ignored("the conversation is what the agent sends; nothing is cleared from it", []),
    "max_tool_calls": _ignored("it counts calls of hosted tools, of which there are none"),
    "background": _refused("an answer comes with its call", False),
    "conversation": _refused("nothing is kept here: send the whole conversation"),
    "previous_response_id": _refused("nothing is kept here: send the whole conversation, as SDKs do with `store = false`"),
    "prompt": _refused("there are no stored prompts: send the conversation"),
}
"""Fields of `/v1/responses`."""
MESSAGE: Fields = {
    "role": _taken("`system`, `developer`, `user`, `assistant`, `tool`"),
    "content": _taken("a text, or parts of type `text`"),
    "name": _taken("as the chat template shows it"),
    "tool_calls": _taken("of the assistant"),
    "tool_call_id": _taken("of a tool's result"),
    "reasoning_content": _taken("the thought; it may be left out"),
    "reasoning": _taken("the same, as vLLM calls it"),
    "refusal": _refused("put it into `content`", ""),
    "annotations": _ignored("of hosted tools", []),
    "audio": _refused("the policy reads text"),
    "images": _refused("the policy reads text", []),
    "function_call": _refused("give `tool_calls`"),
    "cache_control": _NO_TOKEN,
    "provider_specific_fields": _NO_TOKEN,
    "thinking_blocks": _NO_TOKEN,
}
"""Fields of a message of `/v1/chat/completions`."""
TABLES: Mapping[str, Fields] = {
    "/v1/chat/completions": CHAT,
    "a message of it": MESSAGE,
    "/v1/completions": COMPLETIONS,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
    "sampling_params of /inference/v1/generate": PARAMS,
}
"""All of them, by the name that docs/gateway.md gives them."""


def sampled(body: Mapping[str, Any], known: Fields, where: str = "") -> dict[str, Any]:
    """The fields of a request that say how its tokens are drawn: those that the table does not know, and a temperature that counts.

    Raises:
        ApiError: a field is refused at the value that it has.
    """
    found: dict[str, Any] = {}
    for name, value in body.items():
        if value is None:
            continue
        field = known.get(name)
        if field is None or (field.is_drawn and not field.drops(value)):
            found[name] = value
        elif not field.allows(value):
            raise unsupported(name, value, field, where)
    return found


def ignored(body: Mapping[str, Any], known: Fields) -> list[str]:
    """Names of the fields of a request that have no effect, though their callers may expect one."""
    return [name for name, value in body.items() if value is not None and name in known and known[name].drops(value)]


def unsupported(name: str, value: Any, field: Field, where: str = "") -> ApiError:
    """The refusal of a field at a value."""
    expected = f"{name} {field.neutral[0]!r}" if field.neutral else f"no {name}"
    hint = field.note.replace("`", "")
    return refused(f"expected {expected}, got {value!r:.80}", hint=hint, code="unsupported_parameter", param=where + name)
