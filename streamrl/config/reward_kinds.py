"""The built-in rewards: their names, their options, and what they ask of a run (docs/rewards.md).

`streamrl.rewards.factory` builds them; here they are known without loading any of them, so that a configuration and the rows of a
data set are checked before a run starts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from streamrl.config.bounds import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt, Section
from streamrl.errors import ConfigError

LATE = "late"
"""`reward.kind` of runs whose rewards come after their samples."""
BOXED = "boxed_"
"""Before a kind's name: it is given what the last box of a completion holds."""
NOT_OF_ROWS = frozenset({"url", "model", "token_env", "isolation"})
"""Options that say to whom texts and keys are sent, and how programs are kept apart: the configuration's, never a row's."""


class NoOptions(Section, frozen=True, kw_only=True):
    """Of a kind without any."""


class Gsm8k(Section, frozen=True, kw_only=True):
    """`gsm8k`."""

    format_reward: float = 0.0
    """Added when the completion ended by itself and its number stands behind a marker."""
    marked_only: bool = False
    """A number without a marker counts as no answer."""


class Math(Section, frozen=True, kw_only=True):
    """`math`."""

    boxed_only: bool = False
    """A completion without a box is wrong."""


class Dapo(Section, frozen=True, kw_only=True):
    """`dapo`."""

    strict_box: bool = False
    """The answer is the last box of the last 100 characters, and has to be the label letter by letter."""


class DeepScaler(Section, frozen=True, kw_only=True):
    """`deepscaler`."""

    marker: bool = True
    """A completion without `</think>` or `###Response` is wrong."""


class Random(Section, frozen=True, kw_only=True):
    """`random`."""

    probability: Fraction = 0.5
    """Of a reward of 1."""


class Calls(Section, frozen=True, kw_only=True):
    """Of kinds that ask a server."""

    url: str = ""
    """Where it is asked; http or https, without a password."""
    token_env: str = ""
    """Environment variable of the producers whose value is sent as `Authorization: Bearer`; empty: none is."""
    timeout_s: PositiveFloat = 30.0
    """Of one try."""
    total_s: PositiveFloat = 120.0
    """Of all tries for an episode, waits between them included."""
    attempts: PositiveInt = 5
    """Tries where it cannot be reached, is busy (408, 425, 429, 5xx) or takes too long; other answers are final."""
    backoff_s: PositiveFloat = 0.5
    """Longest wait after the first try; it doubles with each, up to 30 s. What the server asks for by `Retry-After` is waited, too, up to
    30 s."""
    concurrency: PositiveInt = 64
    """Calls, and connections, at once in a process."""


class Remote(Calls, frozen=True, kw_only=True):
    """`remote`."""


class Judge(Calls, frozen=True, kw_only=True):
    """`judge`. `url` ends before `/chat/completions`."""

    model: str = ""
    """Its name at the endpoint."""
    template: str = ""
    """User message, with `{prompt}`, `{response}` and `{label}`; empty: that of docs/rewards.md."""
    system: str = ""
    """System message; empty: none."""
    pattern: str = r"\[\[\s*(-?\d+(?:\.\d+)?)\s*\]\]"
    """Regular expression with one group, the score; of several matches the last counts."""
    verdicts: dict[str, float] = {}
    """Scores by what the group matches, in lower case, such as `yes = 1`; empty: it is a number."""
    low: float = 0.0
    """A number below it is no score."""
    high: float = 10.0
    """A number above it is no score."""
    scaled: bool = True
    """The reward is (score - low) / (high - low); otherwise it is the score. Not of verdicts."""
    temperature: NonNegativeFloat = 0.0
    """Of the judge."""
    max_tokens: PositiveInt = 1024
    """Of its answer."""


class Python(Section, frozen=True, kw_only=True):
    """`python`."""

    tests_key: str = "tests"
    """Entry of the row's metadata with the tests; where there is none, the label holds them."""
    fraction: bool = False
    """The reward is the fraction of the tests that pass; otherwise 1 where all do, and 0."""
    timeout_s: PositiveFloat = 6.0
    """Of one test, in wall-clock and in processor time."""
    memory_bytes: Annotated[int, Meta(ge=32 << 20)] = 512 << 20
    """Of one test."""
    max_tests: PositiveInt = 64
    """The first so many of a row are run."""
    isolation: Literal["any", "namespaces", "landlock", "limits"] = "any"
    """The only one that is good enough (docs/sandbox.md); any: the strongest that the host allows, and the log says what it lacks."""


class Instructions(Section, frozen=True, kw_only=True):
    """`ifbench` and `ifeval`."""

    loose: bool = False
    """An instruction is followed, too, where it is without the first or the last line, or without asterisks."""
    fraction: bool = False
    """The reward is the fraction of the instructions that are followed; otherwise 1 where all are, and 0."""


Options = NoOptions | Gsm8k | Math | Dapo | DeepScaler | Random | Remote | Judge | Python | Instructions


class RewardKind(msgspec.Struct, frozen=True, kw_only=True):
    """What `reward.kind`, or a row, may name."""

    options: type[Any] = NoOptions
    in_children: bool = False
    """It may block or hang: it is run in processes that can be killed."""
    boxed: bool = True
    """Whether `boxed_` may stand before it."""


KINDS: Mapping[str, RewardKind] = MappingProxyType(
    {
        "exact_match": RewardKind(),
        "gsm8k": RewardKind(options=Gsm8k),
        "math": RewardKind(options=Math, in_children=True),
        "dapo": RewardKind(options=Dapo),
        "deepscaler": RewardKind(options=DeepScaler, in_children=True),
        "f1": RewardKind(),
        "gpqa": RewardKind(),
        "random": RewardKind(options=Random, boxed=False),
        "remote": RewardKind(options=Remote),
        "judge": RewardKind(options=Judge),
        "python": RewardKind(options=Python, in_children=True, boxed=False),
        "ifbench": RewardKind(options=Instructions, in_children=True, boxed=False),
        "ifeval": RewardKind(options=Instructions, in_children=True, boxed=False),
    }
)
ASKS = frozenset(kind for kind, known in KINDS.items() if issubclass(known.options, Calls))
"""Kinds that send texts to a server."""


def named(kind: str) -> tuple[RewardKind, bool] | None:
    """A built-in kind, and whether `boxed_` stands before it; None for other names, `late` too."""
    if kind in KINDS:
        return KINDS[kind], False
    found = KINDS.get(kind.removeprefix(BOXED)) if kind.startswith(BOXED) else None
    return None if found is None or not found.boxed else (found, True)


def options_of(kind: str, options: Mapping[str, Any], *, key: str = "reward") -> Options:
    """The options of a built-in kind, checked.

    Args:
        kind: as it is written.
        options: by name.
        key: what holds `kind` and `options`, for messages.

    Raises:
        ConfigError: there is no such kind, or not with these options.
    """
    found = named(kind)
    if found is None:
        raise _unknown(kind, key)
    known = found[0].options.__struct_fields__
    where = f"{key}.options"
    if unknown := sorted(set(options) - set(known)):
        if not known:
            raise ConfigError(f"{where} must be empty for {kind}, got {unknown}", hint=f"remove {where}", key=where, got=unknown)
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "docs/rewards.md has the options of each kind"
        if unknown[0] in ("api_key", "token", "password", "headers"):
            hint = "name an environment variable in token_env: what stands in a configuration is kept with the run"
        raise ConfigError(f"{where} of {kind}: expected {', '.join(known)}, got {unknown}", hint=hint, key=where, kind=kind, got=unknown)
    try:
        made: Any = msgspec.convert(dict(options), found[0].options, strict=True)
    except msgspec.ValidationError as error:
        hint = "docs/rewards.md has the options of each kind"
        raise ConfigError(f"{where} of {kind} cannot be used: {error}", hint=hint, key=where, kind=kind) from error
    if issubclass(found[0].options, Calls):
        _check_calls(kind, made, where)
    return made


def _unknown(kind: str, key: str) -> ConfigError:
    plain = kind.removeprefix(BOXED)
    if plain != kind and plain in KINDS:
        return ConfigError(
            f"{key}.kind = {kind!r}: {plain} does not read an answer that a box could hold",
            hint=f"set it to {plain!r}",
            key=f"{key}.kind",
            kind=kind,
        )
    near = difflib.get_close_matches(plain, [*KINDS, LATE], n=1)
    return ConfigError(
        f"{key}.kind must be {', '.join((*KINDS, LATE))} or name user code, got {kind!r}",
        hint=f"did you mean {near[0]!r}?" if near else "write it as file.py:name",
        key=f"{key}.kind",
        kind=kind,
    )


def _check_calls(kind: str, options: Calls, where: str) -> None:
    try:
        parts = urlsplit(options.url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        password = parts.password is not None or parts.username is not None
    except ValueError:
        usable = password = False
    if password:
        # The text is not repeated: it holds a password.
        message = f"{where}.url of {kind} holds a user or a password, which would be kept with the run"
        raise ConfigError(message, hint="name an environment variable in token_env", key=f"{where}.url")
    if not usable:
        message = f"{where}.url of {kind} must be an address such as http://127.0.0.1:8000/score, got {options.url!r}"
        raise ConfigError(message, hint=f"set {where}.url", key=f"{where}.url")
    if isinstance(options, Judge):
        _check_judge(options, where)


def _check_judge(options: Judge, where: str) -> None:
    def no(name: str, expected: str, got: object) -> ConfigError:
        return ConfigError(f"{where}.{name} of judge must be {expected}, got {got}", hint="see docs/rewards.md", key=f"{where}.{name}")

    if not options.model:
        raise no("model", "the name of a model at the endpoint", "nothing")
    if options.template and "{response}" not in options.template:
        raise no("template", "a text with {response} in it", repr(options.template[:80]))
    try:
        groups = re.compile(options.pattern).groups
    except re.error as error:
        raise no("pattern", "a regular expression", f"{options.pattern!r}: {error}") from error
    if groups != 1:
        raise no("pattern", "a regular expression with one group", f"{groups} in {options.pattern!r}")
    if not options.verdicts and not options.low < options.high:
        raise no("high", f"above low = {options.low:g}", f"{options.high:g}")
