"""Reading the body of `POST /generate`: rows that differ in their seed only become one request with several completions."""

from __future__ import annotations

import itertools
import secrets

import msgspec

from streamrl.core.seeds import rollout_seed
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.wire import GenerateBody, SamplingParams, sampling_of
from streamrl.errors import SchemaError

HINT = "the subset of SGLang's /generate that is understood is in streamrl/engines/wire.py"


class Numbers:
    """Ids that no other request to this server has."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(4)
        self._count = itertools.count()

    def next(self, kind: str = "http") -> str:
        """The next id."""
        return f"{kind}-{self._prefix}-{next(self._count)}"


class Group(msgspec.Struct, frozen=True):
    """One engine request, and the rows of the body that it answers."""

    request: GenerateRequest
    rids: tuple[str, ...]
    """The rows' rids; row k is completion k."""
    first: int
    """Place of the first row in the answer."""
    listed: bool
    """Whether the body asked with a list, so that the answer is one."""


def read_groups(data: bytes, numbers: Numbers, policy: str) -> tuple[list[Group], GenerateBody]:
    """Parse and group; neighbours with equal prompt and sampling share one request. `policy` is asked for unless the body names one.

    Raises:
        SchemaError: the body is not what `GenerateBody` describes.
    """
    try:
        body = msgspec.json.decode(data, type=GenerateBody)
        text = bytes(body.input_ids).strip()
        listed = text[1:].lstrip().startswith(b"[")
        prompts = msgspec.json.decode(text, type=list[tuple[int, ...]]) if listed else [msgspec.json.decode(text, type=tuple[int, ...])]
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"expected a /generate body, got: {error}", hint=HINT) from error
    params = body.sampling_params if body.sampling_params is not None else SamplingParams()
    each = params if isinstance(params, list) else [params] * len(prompts)
    if len(each) != len(prompts):
        raise SchemaError(f"expected sampling_params for {len(prompts)} prompts, got {len(each)}", hint="give one object, or one a prompt")
    rids = _rids(body, len(prompts), numbers)
    groups: list[Group] = []
    first = start = 0
    while start < len(prompts):
        end = start + 1
        key = _without_seed(each[start])
        while each[start].n == 1 and end < len(prompts) and prompts[end] == prompts[start] and _without_seed(each[end]) == key:
            end += 1
        seeds = tuple(seed for one in each[start:end] for seed in _seeds(one))
        names = tuple(rids[start:end]) if each[start].n == 1 else tuple(f"{rids[start]}.{k}" for k in range(each[start].n))
        request = GenerateRequest(
            request_id=numbers.next(),
            prompt_ids=prompts[start],
            sampling=sampling_of(each[start]),
            policy=body.policy or policy,
            seeds=seeds,
            min_version=body.min_version,
            min_epoch=body.min_epoch,
            session=body.session,
            stream=body.stream,
        )
        groups.append(Group(request, names, first, listed))
        first += len(seeds)
        start = end
    if not groups:
        raise SchemaError("expected at least one prompt in input_ids, got none", hint=HINT)
    return groups, body


def _rids(body: GenerateBody, count: int, numbers: Numbers) -> list[str]:
    if body.rid is None:
        name = numbers.next("rid")
        return [f"{name}.{k}" for k in range(count)]
    if isinstance(body.rid, str):
        return [body.rid] if count == 1 else [f"{body.rid}.{k}" for k in range(count)]
    if len(body.rid) != count or len(set(body.rid)) != count:
        raise SchemaError(f"expected {count} different rids for {count} prompts, got {body.rid}", hint="give one rid, or one a prompt")
    return body.rid


def _without_seed(params: SamplingParams) -> SamplingParams:
    return msgspec.structs.replace(params, sampling_seed=None)


def _seeds(params: SamplingParams) -> tuple[int, ...]:
    if not 1 <= params.n <= 4096:
        raise SchemaError(f"expected sampling_params.n in 1 .. 4096, got {params.n}", hint=HINT)
    if params.n == 1:
        return (secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed,)
    base = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed & 0x7FFFFFFFFFFFFFFF
    return tuple(rollout_seed(base, k) for k in range(params.n))
