"""The HTTP subset shared with SGLang: names of fields as JSON structs. Ours beyond SGLang's are marked.

`POST /generate` takes one prompt or a batch of prompts in `input_ids` and gives one object or a list of them; with
`stream` it gives server-sent events, one object each (`index` says whose), and `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.schemas.samples import LEAST_LOGPROB, MOST_LOGPROB, VersionSpan
from streamrl.schemas.tasks import FORMER_FIELDS, Sampling
from streamrl.schemas.versions import Version


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`sampling_params` of a request; what is not here is refused, because ignoring it would sample from another distribution."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    stop: str | tuple[str, ...] | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    json_schema: str | None = None
    regex: str | None = None
    n: int = 1
    sampling_seed: int | None = None


def params_of(sampling: Sampling, seed: int) -> SamplingParams:
    """The same as `sampling_params`, for one completion."""
    later = sampling.later()
    return SamplingParams(**{name: getattr(sampling, name) for name in FORMER_FIELDS}, **later, sampling_seed=seed)


def sampling_of(params: SamplingParams) -> Sampling:
    """What `sampling_params` ask for, but for seed and number; raises SchemaError for values out of their bounds."""
    stop = (params.stop,) if isinstance(params.stop, str) else params.stop or ()
    numbers = ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    return Sampling(
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop_token_ids=params.stop_token_ids or (),
        ignore_eos=params.ignore_eos,
        **{name: getattr(params, name) for name in numbers},
        stop=stop,
        logit_bias=params.logit_bias or {},
        json_schema=params.json_schema or "",
        regex=params.regex or "",
    )


class GenerateBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Body of `POST /generate`."""

    input_ids: msgspec.Raw
    """One list of token ids, or a list of such lists."""
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    """Accepted for SGLang's clients; prompt log-probs are not given."""
    cache_salt: str | None = None
    """Accepted for SGLang's clients; no prefix outlives its request here."""
    policy: str = ""
    """Ours: refuse the request unless this policy is served; empty: any."""
    min_version: int = 0
    """Ours: start only once this version number or a later one of `min_epoch` is served, or any of a later epoch."""
    min_epoch: int = 0
    session: str = ""
    """Ours: requests of one session prefer one engine."""
    incremental: bool = False
    """Ours: a streamed object holds its new tokens only; otherwise, as SGLang does, all tokens so far."""


class SpanOut(msgspec.Struct):
    """Output tokens start .. end - 1 were sampled by `version`."""

    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`meta_info` of a result."""

    id: str = ""
    finish_reason: dict[str, Any] | None = None
    """`type` is `stop` (with `matched`), `length` (with `length`) or `abort`; None while it runs."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """So far, also in an incremental stream."""
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    """(log-prob, id, None) of each token in `output_ids`."""
    weight_version: Any = None
    """The newest version among the tokens."""
    weight_versions: list[SpanOut] | None = None
    """Spans over all output tokens so far."""
    streamrl_versions: list[Any] | None = None
    """One version a token, from the streamrl plugin of SGLang."""
    output_token_sampling_logprobs: list[float | None] | None = None
    """SGLang's, when asked for: log-probs after top-p and top-k."""
    output_token_sampling_mask: msgspec.Raw = msgspec.Raw()
    """SGLang's with them: ids of what each token was drawn from, or null. Read by who wants it."""
    output_top_logprobs: msgspec.Raw = msgspec.Raw()
    """SGLang's, when asked for: (log-prob, id, None) of the likeliest tokens at each new one, before top-p and top-k."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were in the prefix cache."""
    num_retractions: int = 0
    """Times the request lost its keys and values to others and was computed again."""
    spec_verify_ct: int = 0
    """Passes that verified drafted tokens (speculative decoding)."""
    spec_num_proposed_drafts: int = 0
    spec_num_correct_drafts: int = 0
    routed_experts: str | None = None
    """Base64. SGLang sends int32; we send the dtype and the shape that the next two name."""
    routed_experts_dtype: str = ""
    routed_experts_shape: tuple[int, int, int] | None = None
    candidates: tuple[str, str, str] | None = None
    """Ours: counts, ids and log-probs of `streamrl.schemas.candidates.Candidates`, in base64."""
    began_s: float = 0.0
    """Ours: Unix seconds at which the engine began to compute it."""
    inexact_versions: bool = False
    """Ours: some spans may be off by tokens (an engine that updates SGLang without the plugin)."""
    logprob_mode: str = ""
    """Ours: `sampled`. SGLang sends none; its log-probs are those before top-p and top-k."""
    engine: str = ""
    """Ours: id of the engine."""


class Result(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One completion, or a streamed part of it."""

    output_ids: list[int] = []
    meta_info: MetaInfo
    index: int = 0
    """Place in the batch (streams)."""
    text: str = ""
    """SGLang's; empty here."""


class ServerInfo(msgspec.Struct, kw_only=True):
    """`GET /server_info`; every field ours."""

    engine: str = ""
    policy: str = "policy"
    serving: str | None = None
    running: int = 0
    waiting: int = 0
    slots: int = 0
    max_len: int = 0
    tokens_total: int = 0
    swaps_total: int = 0
    last_swap_ms: float = 0.0
    counters: dict[str, float] = {}


class ErrorDetail(msgspec.Struct):
    """What was wrong, and what to do."""

    message: str
    hint: str = ""


class ErrorBody(msgspec.Struct):
    """Body of every answer of status 400 and above."""

    error: ErrorDetail


def logprob_problem(ids: Sequence[int], rows: Sequence[tuple[float | None, int, Any]]) -> str:
    """Why these are not the log-probs of the tokens `ids`, one each, with which they were drawn; empty if they may be."""
    if len(rows) != len(ids):
        return f"{len(ids)} tokens and {len(rows)} log-probs"
    for place, (token, (value, of, _)) in enumerate(zip(ids, rows, strict=True)):
        if of != token:
            return f"the log-prob of token {of} for token {token}, which is number {place} of {len(ids)}"
        if value is None or not LEAST_LOGPROB <= value <= MOST_LOGPROB:
            return f"{value} for the log-prob of token {token}, which was drawn"
    return ""


def extend_spans(spans: list[SpanOut], more: Sequence[VersionSpan]) -> None:
    """Append the spans of the next tokens; neighbours of one version are merged."""
    for span in more:
        name, start = str(span.version), spans[-1].end if spans else 0
        if spans and spans[-1].version == name:
            spans[-1].end += span.length
        else:
            spans.append(SpanOut(name, start, start + span.length))


def spans_in(meta: MetaInfo, start: int, end: int) -> tuple[VersionSpan, ...]:
    """Version spans of output tokens start .. end - 1, from the most exact of what a server sends.

    Raises:
        SchemaError: no version, one that is not `epoch.number`, or spans that do not cover the tokens.
    """
    if end <= start:
        return ()
    if meta.streamrl_versions is not None:
        # Indexed from the end: a server that streams increments sends the new tokens' versions only.
        names = meta.streamrl_versions[max(0, len(meta.streamrl_versions) - (end - start)) :]
        pieces = [SpanOut(str(name), at, at + 1) for at, name in enumerate(names, start)]
    elif meta.weight_versions:
        pieces = meta.weight_versions
    else:
        pieces = [SpanOut(str(meta.weight_version), start, end)]
    result: list[VersionSpan] = []
    for piece in pieces:
        length = min(piece.end, end) - max(piece.start, start)
        if length <= 0:
            continue
        version = Version.parse(piece.version)
        if result and result[-1].version == version:
            length += result.pop().length
        result.append(VersionSpan(length, version))
    if sum(span.length for span in result) != end - start:
        raise SchemaError(
            f"expected version spans over output tokens {start} .. {end - 1}, got {meta.streamrl_versions or meta.weight_versions}",
            start=start,
            end=end,
        )
    return tuple(result)
