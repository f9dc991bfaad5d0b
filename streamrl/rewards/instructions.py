"""`ifbench` and `ifeval`: whether a completion follows the instructions of its row, by the checkers of the package if-verifiable.

That package fetches data of NLTK from the network as it is imported, where some is missing. So what it needs is looked for first, and
nothing is fetched. Nothing is drawn, either: a text has one reward, also when it is graded again.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NoReturn

from streamrl.config import reward_kinds
from streamrl.config.instructions import instructions_of
from streamrl.errors import ConfigError, SchemaError
from streamrl.rewards.answers import answering
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

_PACKAGE = "if_verifiable"
_RESOURCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # The library's own import fetches each of the four that is missing; newer versions of NLTK do not read punkt.
        "ifbench": ("tokenizers/punkt", "tokenizers/punkt_tab", "taggers/averaged_perceptron_tagger_eng", "corpora/stopwords"),
        "ifeval": ("tokenizers/punkt_tab",),
    }
)


class Instructions:
    """1.0 where all instructions are followed; parts `strict`, `loose`, their `_fraction`s, and `raised`.

    Args:
        options: checked.

    Raises:
        ConfigError: the package, or data of NLTK, is not there.
    """

    in_children: ClassVar[bool] = True
    kind: ClassVar[str]

    def __init__(self, options: reward_kinds.Instructions) -> None:
        self._options = options
        self._library = library(self.kind)

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """Reasoning up to `</think>` and white space around are left out; an empty text follows nothing.

        A checker that trips over a text (an index, a number, a line of CSV that is none) says that it is not followed; `raised` counts
        the instructions of which one did.

        Raises:
            SchemaError: the row's metadata cannot be used.
        """
        text = (answering(episode) or "").strip()
        try:
            checks = [self._library.check(name, arguments) for name, arguments in instructions_of(self.kind, task.metadata)]
        except SchemaError as error:
            raise SchemaError(f"row {task.row}: {error.message}", hint=error.hint, row=task.row) from error.__cause__
        variants = [variant for variant in self._library.variants(text) if variant.strip()] if text else []
        ends = [_follows(check, text, variants) for check in checks]
        strict, loose = (sum(end[place] for end in ends) / len(ends) for place in (0, 1))
        parts = {"strict": float(strict == 1), "loose": float(loose == 1), "strict_fraction": strict, "loose_fraction": loose}
        name = ("loose" if self._options.loose else "strict") + ("_fraction" if self._options.fraction else "")
        return RewardValue(parts[name], {**parts, "raised": float(sum(end[2] for end in ends))})


class IFBench(Instructions):
    """`ifbench` (arXiv 2507.02833)."""

    kind: ClassVar[str] = "ifbench"


class IFEval(Instructions):
    """`ifeval` (arXiv 2311.07911)."""

    kind: ClassVar[str] = "ifeval"


def _follows(check: Callable[[str], Any], text: str, variants: list[str]) -> tuple[bool, bool, bool]:
    """Strictly; loosely: in one of the variants, the text among them; whether the checker tripped over one that was looked at."""
    raised = False

    def follows(one: str) -> bool:
        nonlocal raised
        try:
            return bool(check(one))
        except (IndexError, ValueError, csv.Error):
            raised = True
            return False

    strict = bool(text) and follows(text)
    return strict, strict or any(map(follows, variants)), raised


class _Zero(int):
    """0 that was given: `not n_start` is how a checker asks whether it was."""

    def __bool__(self) -> bool:
        return True


class Library:
    """The checkers of one kind, loaded.

    Args:
        kind: `ifbench` or `ifeval`.
    """

    def __init__(self, kind: str) -> None:
        check_installed(kind)
        modules = [importlib.import_module(f"{_PACKAGE}.{kind}.{name}") for name in ("instructions", "instructions_util")]
        for module in modules:
            module.random = SimpleNamespace(randint=_drawn, choice=_drawn, sample=_drawn)  # pyright: ignore[reportAttributeAccessIssue]
        self._known: Mapping[str, Any] = importlib.import_module(f"{_PACKAGE}.{kind}.instructions_registry").INSTRUCTION_DICT
        self.variants: Callable[[str], list[str]] = importlib.import_module(f"{_PACKAGE}.common").get_loose_transformations
        """A text without its first line, its last one, both, and each of these without asterisks; itself first."""
        if kind == "ifeval":
            importlib.import_module("langdetect").DetectorFactory.seed = 0

    def check(self, name: str, arguments: Mapping[str, Any]) -> Callable[[str], Any]:
        """Whether a text follows this instruction; raises SchemaError where its arguments ask for nothing that can be checked."""
        checker = self._known[name](name)
        try:
            checker.build_description(**{key: _Zero() if value == 0 else value for key, value in arguments.items()})
        except (_Drawn, LookupError, TypeError, ValueError) as error:
            why = "it would draw another at random" if isinstance(error, _Drawn) else f"{type(error).__name__}: {error}"
            raise SchemaError(f"{name}: expected arguments that its checker takes, got {dict(arguments)!r:.200}: {why:.200}") from error
        return checker.check_following


class _Drawn(Exception):
    """A checker was about to ask for something else than its row does."""


def _drawn(*_: object, **__: object) -> NoReturn:
    """Stands where the library's modules have functions of `random`."""
    raise _Drawn


@cache
def library(kind: str) -> Library:
    """Loaded once a process; raises ConfigError as `check_installed`."""
    return Library(kind)


def check_installed(kind: str) -> None:
    """Raise ConfigError for a package or data of NLTK that is not there. The package is not imported, and nothing is fetched."""
    if importlib.util.find_spec(_PACKAGE) is None:
        raise ConfigError(
            f"expected the package if-verifiable for the reward {kind}, got none", hint="pip install 'streamrl[ifbench]'", key="reward.kind"
        )
    data: Any = importlib.import_module("nltk.data")
    missing: list[str] = []
    for resource in _RESOURCES[kind]:
        try:
            data.find(resource)
        except LookupError:
            missing.append(resource.partition("/")[2])
    if missing:
        raise ConfigError(
            f"expected data of NLTK for the reward {kind}, got none of {', '.join(missing)} in {', '.join(map(str, data.path))}",
            hint=f"python -m nltk.downloader {' '.join(missing)} (with -d FOLDER, and NLTK_DATA=FOLDER where the run starts)",
            key="reward.kind",
        )
