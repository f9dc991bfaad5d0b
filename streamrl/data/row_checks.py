"""What rows ask for of their own tasks (sampling, instructions), held against the rest of a configuration before anything starts."""

from __future__ import annotations

import msgspec

from streamrl.config.check_sampling import check_drawn, check_grammars, check_vocabulary
from streamrl.config.instructions import INSTRUCTIONS, instructions_of
from streamrl.config.paths import parse_dataset
from streamrl.config.tree import Config
from streamrl.data.formats import place_of
from streamrl.data.problems import Problem, Problems
from streamrl.errors import ConfigError, DataError, SchemaError
from streamrl.schemas.tasks import RewardSpec, Sampling, turn_sampling

_REMEMBERED = 4096
"""Different samplings of rows that are not looked at twice."""


def check_rows(problems: Problems, config: Config, base: Sampling, vocab_size: int, *, trained: bool) -> None:
    """Raise DataError for the first row whose sampling does not go with `base`, over which it is put, or whose reward cannot use it.

    Args:
        problems: of the training rows or the held-out ones.
        config: the whole tree.
        base: `sampling` or `evaluation.sampling`.
        vocab_size: of the model.
        trained: whether their tokens are to be trained on.
    """
    path = parse_dataset(config.data.train if trained else config.data.heldout).path
    check = RowCheck(config, base, vocab_size, trained=trained)
    for problem in problems.problems:
        check(problem, path)


class RowCheck:
    """The same for one row after the other; what has been seen of them is not looked at again. The arguments are those of `check_rows`."""

    def __init__(self, config: Config, base: Sampling, vocab_size: int, *, trained: bool) -> None:
        self._config = config
        self._base = base
        self._vocab_size = vocab_size
        self._trained = trained
        self._fine: set[bytes] = set()

    def __call__(self, problem: Problem, path: str) -> None:
        """Raise DataError when the row's own sampling, or what its reward reads of it, does not go with the rest."""
        self._check_sampling(problem, path)
        self._check_reward(problem, path)

    def _check_sampling(self, problem: Problem, path: str) -> None:
        if not problem.sampling or (said := msgspec.json.encode(problem.sampling)) in self._fine:
            return
        config, key = self._config, self._config.data.sampling_key
        try:
            sampling = turn_sampling(self._base, problem.sampling)
            check_drawn(config, sampling, key, trained=self._trained)
            check_grammars(config, sampling, key)
            check_vocabulary(sampling, self._vocab_size, key)
        except (SchemaError, ConfigError) as error:
            values = {"path": path, "line": problem.line, "key": "data.sampling_key"}
            raise DataError(f"{error.message}, at {place_of(path, problem.line)}", hint=error.hint, **values) from error
        if len(self._fine) < _REMEMBERED:
            self._fine.add(said)

    def _check_reward(self, problem: Problem, path: str) -> None:
        kind = problem.reward.kind if isinstance(problem.reward, RewardSpec) else self._config.reward.kind
        if kind not in INSTRUCTIONS:
            return
        try:
            instructions_of(kind, problem.metadata)
        except SchemaError as error:
            values = {"path": path, "line": problem.line, "key": "data.metadata_key"}
            raise DataError(f"{kind}: {error.message}, at {place_of(path, problem.line)}", hint=error.hint, **values) from error
