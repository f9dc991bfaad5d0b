"""What rows ask for of their own tasks' sampling, held against the rest of a configuration before anything starts."""

from __future__ import annotations

import msgspec

from streamrl.config.check_sampling import check_drawn, check_grammars, check_vocabulary
from streamrl.config.paths import parse_dataset
from streamrl.config.tree import Config
from streamrl.data.problems import Problems
from streamrl.errors import ConfigError, DataError, SchemaError
from streamrl.schemas.tasks import Sampling, turn_sampling


def check_rows(problems: Problems, config: Config, base: Sampling, vocab_size: int, *, trained: bool) -> None:
    """Raise DataError for the first row whose own sampling does not go with `base`, over which it is put, or with the configuration.

    Args:
        problems: of the training rows or the held-out ones.
        config: the whole tree.
        base: `sampling` or `evaluation.sampling`.
        vocab_size: of the model.
        trained: whether their tokens are to be trained on.
    """
    path = parse_dataset(config.data.train if trained else config.data.heldout).path
    seen: set[bytes] = set()
    for problem in problems.problems:
        if not problem.sampling or (said := msgspec.json.encode(problem.sampling)) in seen:
            continue
        seen.add(said)
        try:
            sampling = turn_sampling(base, problem.sampling)
            check_drawn(config, sampling, config.data.sampling_key, trained=trained)
            check_grammars(config, sampling, config.data.sampling_key)
            check_vocabulary(sampling, vocab_size, config.data.sampling_key)
        except (SchemaError, ConfigError) as error:
            values = {"path": path, "line": problem.line, "key": "data.sampling_key"}
            raise DataError(f"{error.message}, at {path} line {problem.line}", hint=error.hint, **values) from error
