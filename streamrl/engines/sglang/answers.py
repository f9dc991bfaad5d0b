"""From our requests to SGLang's and from its results to our chunks: plain functions and one small state per completion.

Which distribution the log-probs belong to: SGLang's own (`output_token_logprobs`) are those after penalties, grammar, logit bias and
temperature and before top-k, top-p and min-p, which is what was drawn from where none of them restricts. Where one does,
`return_sampling_mask` brings those after it as well, if top-k is set (to at most 4,096) and nothing is drafted: SGLang refuses it
otherwise. So every token has the log-prob of the distribution it was really drawn from, but with top-p or min-p without top-k, or
beside speculative decoding: those are marked as `temperature`, and the trainer compares them with its own from before them. A greedy
token has the one under temperature 1, as in our other engines.

Stop strings are looked for here, in the text of the tokens as they come: a server without a tokenizer knows none.

What tokens could have been comes as sampling masks (`return_sampling_mask`) and the likeliest (`top_logprobs_num`). An answer holds those
of its new tokens at the end of a list. A mask has the likeliest id first; the token that was drawn is appended where SGLang's own count of
what is kept leaves it out: FlashInfer breaks ties in another way, and sums in another order. Log-probs are said of the drawn token alone.
The likeliest are (log-prob, id, text) under what was drawn from before top-k, top-p and min-p.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from streamrl.config.recording import MOST_MASKED, NOTHING, Recording
from streamrl.engines.experts import Routing, from_sglang
from streamrl.engines.extras import CANDIDATES, EXPERTS, INEXACT, MATCHED, NUMBERS
from streamrl.engines.live_swap.messages import version_of
from streamrl.engines.protocol import Chunk, GenerateRequest
from streamrl.engines.sglang.prefixes import prefix_key
from streamrl.engines.texts import Decode, StopText
from streamrl.engines.wire import MetaInfo, Result, logprob_problem, spans_in
from streamrl.errors import EngineError, SchemaError
from streamrl.schemas.candidates import MOST_RECORDED, Candidates, CandidateSets, bounds_of
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version

_masks = msgspec.json.Decoder(list[list[int] | None] | None).decode
_tops = msgspec.json.Decoder(list[list[tuple[float | None, int, Any]] | None] | None).decode


class _Said:
    """What is said of the tokens of one completion while its answers come in, as far as it is kept.

    Args:
        most: ids of a token, as they were asked for.
        vocab_size: ids are below it; 0: not known.
    """

    _has_logprobs: ClassVar[bool]

    def __init__(self, most: int, vocab_size: int) -> None:
        self._most = most
        self._vocab_size = vocab_size or 2**31
        self._rows: list[Mapping[int, float]] = []
        self._total = 0

    def candidates(self) -> Candidates | None:
        """Of all tokens so far; None where there are none."""
        if not any(self._rows):
            return None
        pairs = [pair for row in self._rows for pair in sorted(row.items())]
        ids, values = np.array(pairs, np.float64).T
        logprobs = values.astype(np.float32) if self._has_logprobs else None
        return Candidates.of(CandidateSets(bounds_of(np.array([len(row) for row in self._rows])), ids.astype(np.int32), logprobs))

    def _add(self, row: Mapping[int, float]) -> None:
        self._total += len(row)
        self._rows.append(row if self._total <= MOST_RECORDED else {})


class Masks(_Said):
    """Masks; `most` is top-k, and no mask has more than one id beyond it."""

    _has_logprobs = False

    def take(self, meta: MetaInfo, tokens: Sequence[int], logprobs: Sequence[float], fresh: int) -> None:
        """The masks of an answer's first new `tokens`, of `fresh`; the log-probs are not needed.

        Raises:
            SchemaError: a token without a mask, or a mask that is none: without its token, with an id twice, outside the vocabulary, or
                of more ids than can be drawn.
        """
        for token, mask in zip(tokens, _newest(meta.output_token_sampling_mask, _masks, "output_token_sampling_mask", fresh), strict=False):
            row: list[int] = sorted(mask or [])
            if token not in row or len(set(row)) != len(row) or len(row) > self._most + 1 or row[0] < 0 or row[-1] >= self._vocab_size:
                raise SchemaError(f"a mask of {len(row)} ids, {row[:8]}, for token {token} drawn with top_k = {self._most}")
            self._add(dict.fromkeys(row, 0.0))


class Likeliest(_Said):
    """The likeliest tokens at each place, and the one that was drawn."""

    _has_logprobs = True

    def take(self, meta: MetaInfo, tokens: Sequence[int], logprobs: Sequence[float], fresh: int) -> None:
        """Those of an answer's first new `tokens`, of `fresh`, which were drawn with `logprobs`.

        Raises:
            SchemaError: a token without any, or what no model says: an id twice, outside the vocabulary, more than were asked for, or a
                log-prob above 0.
        """
        found = _newest(meta.output_top_logprobs, _tops, "output_top_logprobs", fresh)
        for token, logprob, said in zip(tokens, logprobs, found, strict=False):
            ids = [one for _, one, _ in said or ()]
            least, most = min(ids, default=-1), max(ids, default=-1)
            if len(set(ids)) != len(ids) or len(ids) > self._most or least < 0 or most >= self._vocab_size:
                raise SchemaError(f"{len(ids)} likeliest tokens, {ids[:8]}, where {self._most} were asked for")
            # What a grammar or a bias rules out has no finite log-prob.
            row = {one: value for value, one, _ in said or () if value is not None and math.isfinite(value)}
            if max(row.values(), default=0.0) > 1e-4:
                raise SchemaError(f"a log-prob of {max(row.values())} among the likeliest tokens")
            self._add({**row, token: logprob})


def _newest(said: msgspec.Raw, decode: Any, name: str, fresh: int) -> list[Any]:
    """What a list of an answer says of its `fresh` new tokens."""
    try:
        found = (decode(said) if bytes(said) else None) or []
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"{name} is no list of lists: {error}") from error
    if len(found) < fresh:
        raise SchemaError(f"{len(found)} entries for {fresh} new tokens in {name}")
    return found[len(found) - fresh :]


FINISH_REASONS = ("stop", "length", "abort")


class Style(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests to one server have in common."""

    engine: str
    seeded: bool
    """The server draws by seed (`--enable-deterministic-inference`)."""
    isolate: bool
    """Prompts share cached prefixes within a version only."""
    routing: Routing | None = None
    """The model's experts, if the server returns them."""
    stamped: bool = True
    """Every token comes with the version that sampled it."""
    drafts: bool = False
    """The server decodes speculatively."""
    grammars: bool = False
    """The server has a grammar backend."""
    recording: Recording = NOTHING
    """What completions say beside their tokens."""
    vocab_size: int = 0
    """Of the model; 0: not known."""


def body_of(request: GenerateRequest, rid: str, index: int, style: Style, *, limit: int, serving: Version, stream: bool) -> dict[str, Any]:
    """The JSON body for completion `index` of a request.

    Args:
        request: checked.
        rid: id at the server; no other running id may begin with it (an abort takes all that do).
        index: of the completion.
        style: of the server.
        limit: most new tokens.
        serving: version served now.
        stream: ask for tokens as they come.
    """
    sampling = request.sampling
    params: dict[str, Any] = {
        "max_new_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
    }
    later = sampling.later()
    params |= {name: value for name, value in later.items() if name != "stop"}
    if style.seeded:
        # Signed 64 bits there.
        params["sampling_seed"] = request.seeds[index] & 0x7FFF_FFFF_FFFF_FFFF
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": list(request.prompt_ids),
        "sampling_params": params,
        "return_logprob": True,
        "stream": stream,
    }
    if truncates(sampling) and says_support(sampling, style):
        body["return_sampling_mask"] = True
    if says_likeliest(sampling, style):
        body["top_logprobs_num"] = style.recording.top
    if style.isolate:
        body["extra_key"] = prefix_key(serving)
    if style.routing is not None:
        body["return_routed_experts"] = True
    return body


def group_body(bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One JSON body for completions of one request: lists of what tells them apart, and prompts, whose number says how many they are."""
    params = [body["sampling_params"] for body in bodies]
    return {
        **bodies[0],
        "rid": [body["rid"] for body in bodies],
        "input_ids": [body["input_ids"] for body in bodies],
        "sampling_params": params if any(one != params[0] for one in params) else params[0],
    }


def truncates(sampling: Sampling) -> bool:
    """Whether tokens are drawn from a part of the vocabulary."""
    return sampling.temperature > 0 and sampling.cuts


def says_support(sampling: Sampling, style: Style) -> bool:
    """Whether the server can say what a restricted draw was made from."""
    return 0 < sampling.top_k <= MOST_MASKED and not style.drafts


def says_likeliest(sampling: Sampling, style: Style) -> bool:
    """Whether the likeliest tokens are to be said, which are those of what was drawn from: nothing was cut off."""
    return style.recording.top > 0 and sampling.temperature > 0 and not truncates(sampling) and not style.drafts


def must_cut(sampling: Sampling) -> bool:
    """Whether we have to stop ourselves: at stop strings, and where SGLang's `ignore_eos` ignores the request's own stop tokens too."""
    return bool(sampling.stop) or (sampling.ignore_eos and bool(sampling.stop_token_ids))


def check_sampling(request: GenerateRequest, style: Style) -> None:
    """Raise EngineError for what would end the server, or be drawn otherwise than it is asked for."""
    sampling = request.sampling
    asked = (
        # An assertion in SGLang's sampler, which takes the scheduler with it.
        ("min_p", style.seeded and sampling.min_p > 0, "engine.deterministic = true: SGLang draws by seed without min-p only"),
        ("json_schema", bool(sampling.json_schema) and not style.grammars, "a server without grammars: set engine.sglang.grammar_backend"),
        ("regex", bool(sampling.regex) and not style.grammars, "a server without grammars: set engine.sglang.grammar_backend"),
        *(
            (name, style.drafts and name in sampling.later(), "speculative decoding, with which it has not been tried")
            for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "json_schema", "regex")
        ),
    )
    for name, found, why in asked:
        if found:
            raise EngineError(
                f"engine {style.engine} cannot do what sampling.{name} of request {request.request_id!r} asks for with {why}",
                hint=f"leave sampling.{name} out",
                key=f"sampling.{name}",
            )


class Row:
    """One completion while its results come in.

    Args:
        request: what was asked.
        index: of the completion.
        style: of the server.
        began: version served when it was sent.
        decode: tokens to text, where the request has stop strings.
    """

    def __init__(self, request: GenerateRequest, index: int, style: Style, began: Version, decode: Decode | None = None) -> None:
        self._request = request
        self._index = index
        self._style = style
        self._began = began
        restricted = truncates(request.sampling)
        self._restricted = restricted and says_support(request.sampling, style)
        self._mode = LogprobMode.TEMPERATURE if restricted and not self._restricted else LogprobMode.SAMPLED
        self._stops = frozenset(request.sampling.stop_token_ids) if must_cut(request.sampling) else frozenset[int]()
        self._record: Masks | Likeliest | None = None
        if self._restricted and style.recording.support:
            self._record = Masks(request.sampling.top_k, style.vocab_size)
        elif says_likeliest(request.sampling, style):
            self._record = Likeliest(style.recording.top, style.vocab_size)
        self._text = StopText(decode, request.sampling.stop) if decode is not None and request.sampling.stop else None
        self._matched = ""
        self._inexact = False
        self.tokens = 0
        """Tokens handed on so far."""
        self.cut = False
        """It ended at a stop token that the server goes on after: to be aborted there."""

    def take(self, result: Result) -> Chunk | None:
        """The chunk for a result; None when it brings neither tokens nor an end.

        Raises:
            EngineError: a token without a log-prob or without a version.
        """
        meta = result.meta_info
        reason = self._reason(meta)
        fresh = meta.completion_tokens - self.tokens
        if reason == "abort" and self._style.stamped and fresh > len(meta.streamrl_versions or ()):
            # Aborted while it waited to be computed again: SGLang gives back its tokens, but not what it knows about them.
            fresh = 0
        ids = result.output_ids[len(result.output_ids) - fresh :] if fresh > 0 else []
        if len(ids) != max(0, fresh):
            raise self._wrong(f"{max(0, fresh)} new tokens", f"{len(ids)} tokens")
        logprobs = self._logprobs(meta, ids)
        spans = self._spans(meta, len(ids))
        stop = next((at for at, token in enumerate(ids) if self._ends(token)), None)
        if stop is not None:
            self.cut = reason is None
            reason = "stop"
            ids, logprobs, spans = ids[: stop + 1], logprobs[: stop + 1], _first(spans, stop + 1)
        if self._record is not None and ids:
            self._say(self._record, meta, ids, logprobs, fresh)
        self.tokens += len(ids)
        if not ids and reason is None:
            return None
        return Chunk(
            completion=self._index,
            token_ids=tuple(ids),
            logprobs=tuple(logprobs),
            spans=spans,
            finish_reason=reason,
            logprob_mode=self._mode,
            engine=self._style.engine,
            extras=self._extras(meta) if reason is not None else {},
        )

    def _say(self, record: Masks | Likeliest, meta: MetaInfo, ids: Sequence[int], logprobs: Sequence[float], fresh: int) -> None:
        """What the first `ids` of an answer's `fresh` tokens could have been."""
        try:
            record.take(meta, ids, logprobs, fresh)
        except SchemaError as error:
            raise self._wrong("what else each token could have been", error.message) from error

    def _ends(self, token: int) -> bool:
        if self._text is not None:
            self._matched = self._text.take(token)
        return bool(self._matched) or token in self._stops

    def _reason(self, meta: MetaInfo) -> str | None:
        if meta.finish_reason is None:
            return None
        kind = meta.finish_reason.get("type")
        if kind not in FINISH_REASONS:
            raise self._wrong(f"a finish reason of {FINISH_REASONS}", str(meta.finish_reason))
        if kind == "abort" and meta.finish_reason.get("status_code"):
            raise EngineError(
                f"SGLang at engine {self._style.engine} gave request {self._request.request_id!r} up: {meta.finish_reason.get('message')}",
                hint="see the server's log",
                gave_up=meta.finish_reason.get("message"),
            )
        return kind

    def _logprobs(self, meta: MetaInfo, ids: Sequence[int]) -> list[float]:
        """Read those of the newest tokens, `ids`. SGLang says of which token each is before anything was cut off, and not after."""
        said: Sequence[tuple[float | None, int, Any]] = meta.output_token_logprobs or ()
        newest = said[len(said) - len(ids) :] if ids else ()
        if self._restricted and ids:
            values = meta.output_token_sampling_logprobs or ()
            if len(newest) == len(ids) <= len(values):
                newest = [(value, row[1], None) for value, row in zip(values[len(values) - len(ids) :], newest, strict=True)]
            else:
                newest = ()
        if problem := logprob_problem(ids, newest):
            raise self._wrong(f"{len(ids)} new tokens with their log-probs", problem)
        return [value for value, _, _ in newest if value is not None]

    def _spans(self, meta: MetaInfo, count: int) -> tuple[VersionSpan, ...]:
        if not count:
            return ()
        try:
            if self._style.stamped:
                if len(meta.streamrl_versions or ()) < count:
                    raise SchemaError(f"got {len(meta.streamrl_versions or ())} versions for {count} tokens")
                return _stamped(meta.streamrl_versions or (), count)
            return self._guessed(meta, count)
        except SchemaError as error:
            raise self._wrong("the version that sampled each token", error.message) from error

    def _guessed(self, meta: MetaInfo, count: int) -> tuple[VersionSpan, ...]:
        """Versions from SGLang's own words. They are exact for a completion during which nothing was committed.

        Its spans (0.5.18 and later) begin a token early where a pass was under way at the update. Without spans, all tokens get the version
        that was served when the request was sent, so that none counts as younger than it is.
        """
        # A plugin that was there and could not swap stamps that it knows nothing.
        meta.streamrl_versions = None
        if meta.finish_reason is not None and meta.weight_versions:
            self._inexact |= len(meta.weight_versions) > 1
            return spans_in(meta, self.tokens, self.tokens + count)
        newest = Version.parse(str(meta.weight_version))
        self._inexact |= newest != self._began
        return (VersionSpan(count, min(self._began, newest)),)

    def _extras(self, meta: MetaInfo) -> dict[str, Any]:
        extras: dict[str, Any] = {name: value for name in NUMBERS if (value := getattr(meta, name))}
        if self._inexact:
            extras[INEXACT] = True
        if self._matched:
            extras[MATCHED] = self._matched
        if self._record is not None and (candidates := self._record.candidates()) is not None:
            extras[CANDIDATES] = candidates
        if self._style.routing is not None and meta.routed_experts is not None:
            tokens = len(self._request.prompt_ids) + meta.completion_tokens - 1
            try:
                extras[EXPERTS] = from_sglang(meta.routed_experts, self._style.routing, tokens=tokens)
            except SchemaError as error:
                raise self._wrong("routed experts of the whole sequence", error.message) from error
        return extras

    def _wrong(self, expected: str, got: str) -> EngineError:
        return EngineError(
            f"expected {expected} from SGLang at engine {self._style.engine} for {self._request.request_id!r}, got {got}",
            hint="is this version of SGLang one that streamrl was tried with (0.5.17 to 0.5.23)?",
            expected=expected,
            got=got,
        )


def _stamped(stamps: Sequence[int], count: int) -> tuple[VersionSpan, ...]:
    """Spans of the last `count` tokens."""
    return _merged([VersionSpan(1, version_of(stamp)) for stamp in stamps[len(stamps) - count :]])


def _first(spans: Sequence[VersionSpan], count: int) -> tuple[VersionSpan, ...]:
    """The spans of the first `count` tokens."""
    kept: list[VersionSpan] = []
    for span in spans:
        length = min(span.length, count)
        if length <= 0:
            break
        kept.append(VersionSpan(length, span.version))
        count -= length
    return tuple(kept)


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one completion as one."""
    return msgspec.structs.replace(
        chunks[-1],
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
        spans=_merged([span for chunk in chunks for span in chunk.spans]),
    )


def aborted(index: int, style: Style) -> Chunk:
    """The only chunk of a completion that was cut before it was sent."""
    return Chunk(completion=index, token_ids=(), logprobs=(), spans=(), finish_reason="abort", engine=style.engine)


def _merged(spans: Sequence[VersionSpan]) -> tuple[VersionSpan, ...]:
    merged: list[VersionSpan] = []
    for span in spans:
        length = merged.pop().length if merged and merged[-1].version == span.version else 0
        merged.append(VersionSpan(length + span.length, span.version))
    return tuple(merged)
