"""Training rows that are read and encoded when their turn comes, and the sets that a run's tasks are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from streamrl.config.check_sampling import check_drawn, check_grammars, check_vocabulary
from streamrl.config.data import data_sets
from streamrl.config.instructions import INSTRUCTIONS, instructions_of
from streamrl.config.paths import parse_dataset
from streamrl.config.tree import Config, DataConfig
from streamrl.data.formats import place_of
from streamrl.data.mapped_rows import MappedRows, blocks_digest, open_first, open_mapped
from streamrl.data.mixed import MixedRows
from streamrl.data.problems import (
    BROKEN,
    TOO_LONG,
    WITH_IMAGES,
    Problem,
    Problems,
    TaskRows,
    Unusable,
    load_problems,
    no_token,
    problem_text,
    read_problem,
)
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import ConfigError, DataError, SchemaError
from streamrl.schemas.codec import encode
from streamrl.schemas.tasks import Refused, RewardSpec, Sampling, turn_sampling

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


_LONGEST_DETAIL = 500
"""Characters of what a tombstone says of a row."""
_LARGEST_TASK = 4 << 20
"""Bytes of a row's values on the wire."""
_TRIED = 256
"""Rows that are looked at before a run starts."""
_HOPELESS_ROWS = 1000
_HOPELESS_SHARE = 0.95


class StreamedProblems:
    """The rows of one set as problems, none of which is kept.

    Args:
        rows: of the set.
        config: the keys by which they are read.
        tokenizer: of the policy.
        sampling: looks at a row's own sampling, where it is to be.
    """

    def __init__(self, rows: MappedRows, config: DataConfig, tokenizer: Tokenizer, sampling: RowCheck | None = None) -> None:
        if config.chat_template:
            tokenizer.check_template_kwargs(config.chat_template_kwargs)
        self._rows = rows
        self._config = config
        self._tokenizer = tokenizer
        self._sampling = sampling

    @property
    def digest(self) -> str:
        """See MappedRows."""
        return self._rows.digest

    def __len__(self) -> int:
        return len(self._rows)

    def order(self, seed: int, place: int, *, shuffle: bool) -> tuple[int, int]:
        """See TaskRows."""
        return self._rows.order(seed, place, shuffle=shuffle)

    def take(self, rows: Sequence[int]) -> list[Problem | Unusable]:
        """See TaskRows. Raises DataError when a file is not any more what was opened: then no row is known to be what it was."""
        self._rows.check()
        found: dict[int, Problem | Unusable] = {}
        texts: dict[int, str] = {}
        for place, row in enumerate(rows):
            try:
                problem = self._read(row)
                texts[place] = self._text(problem)
                found[place] = problem
            except DataError as error:
                found[place] = self._broken(row, error)
        self._rows.check()  # a file that was cut meanwhile gives broken rows, which must not be told of
        encoded = self._tokenizer.encode_many(list(texts.values()), add_special_tokens=not self._config.chat_template)
        for place, ids in zip(texts, encoded, strict=True):
            found[place] = self._encoded(found[place], ids)
        return [found[place] for place in range(len(rows))]

    def _read(self, row: int) -> Problem:
        rows = self._rows
        problem = read_problem(rows.read(row), self._config, row_number=row, line=rows.line(row), path=rows.path)
        if self._sampling is not None:
            self._sampling(problem, rows.path)
        return problem

    def _text(self, problem: Problem) -> str:
        """What is to be encoded; raises DataError where the template or the wire cannot take the row's values."""
        try:
            text = problem_text(problem, self._config, self._tokenizer, self._rows.path)
            nbytes = len(encode((problem.prompt, problem.label, problem.tools, problem.metadata, problem.chat_template_kwargs or None)))
            text.encode()
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, msgspec.MsgspecError) as error:
            raise self._refuses(problem, f"values that cannot be used: {type(error).__name__}: {error}") from error
        if nbytes > _LARGEST_TASK:
            raise self._refuses(problem, f"values of {nbytes} bytes, of which at most {_LARGEST_TASK} fit a task")
        return text

    def _refuses(self, problem: Problem, got: str) -> DataError:
        return DataError(f"expected a row for a task at {place_of(self._rows.path, problem.line)}, got {got}", line=problem.line)

    def _broken(self, row: int, error: DataError) -> Unusable:
        """The row with what is wrong with it, which names its file and line whatever the error does."""
        place, said = place_of(self._rows.path, self._rows.line(row)), error.message[:_LONGEST_DETAIL]
        if place not in said:
            said = f"{place}: {said}"[:_LONGEST_DETAIL]
        return Unusable(row=row, reason=BROKEN, detail=said, hint=error.hint)

    def _encoded(self, problem: Problem | Unusable, ids: Sequence[int]) -> Problem | Unusable:
        assert isinstance(problem, Problem)
        if not ids:
            return self._broken(problem.row, no_token(problem, self._config, self._rows.path))
        if len(ids) > (most := self._config.max_prompt_tokens):
            said = f"expected a prompt of at most {most} tokens at {place_of(self._rows.path, problem.line)}, got {len(ids)}"
            return Unusable(row=problem.row, reason=TOO_LONG, detail=said)
        return replace(problem, prompt_ids=tuple(ids))


def open_task_rows(config: Config, tokenizer: Tokenizer, kept: Path, *, vocab_size: int | None = None) -> TaskRows | MixedRows:
    """The training rows of a run as `data.sources` and `data.reading` have it.

    Args:
        config: the whole tree.
        tokenizer: of the policy.
        kept: folder for indices.
        vocab_size: of the policy; None: rows' own sampling is taken as it is.

    Raises:
        DataError: a set cannot be read; with `whole` also for a row that is broken.
        ConfigError: as `load_problems`.
    """
    if config.data.reading == "whole":
        return load_problems(config.data.train, config.data, tokenizer)
    sets = [_streamed(open_mapped(one.train, kept), one, config, tokenizer, vocab_size) for _, one in data_sets(config.data)]
    if not config.data.sources:
        return sets[0]
    return MixedRows(tuple(one.name for one in config.data.sources), tuple(sets))


def _streamed(rows: MappedRows, data: DataConfig, config: Config, tokenizer: Tokenizer, vocab_size: int | None) -> StreamedProblems:
    config = replace(config, data=data)
    sampling = None if vocab_size is None else RowCheck(config, config.sampling, vocab_size, trained=True)
    return StreamedProblems(rows, data, tokenizer, sampling)


def try_rows(config: Config, tokenizer: Tokenizer, kept: Path, *, vocab_size: int) -> list[tuple[str, list[Unusable], int]]:
    """By name of the set, those of its first rows that cannot be used, and how many were looked at.

    Args and raises as `open_task_rows`; DataError also when all first rows of a set are so.
    """
    found: list[tuple[str, list[Unusable], int]] = []
    for name, data in data_sets(config.data):
        rows = open_first(data.train, kept, _TRIED)
        problems, tried = _streamed(rows, data, config, tokenizer, vocab_size), range(min(_TRIED, len(rows)))
        at_once = WITH_IMAGES if data.images_key else _TRIED
        read = (problems.take(tried[first : first + at_once]) for first in range(0, len(tried), at_once))
        unusable = [one for some in read for one in some if isinstance(one, Unusable)]
        if len(unusable) == len(tried):
            raise _hopeless(unusable[0], len(unusable), len(tried))
        found.append((name, unusable, len(tried)))
    return found


def rows_digest(config: Config) -> str:
    """What the run record has of streamed rows: of sampled blocks of their files, and the slice. Known at once, however many they are."""
    if not config.data.sources:
        return f"blocks:{blocks_digest(config.data.train)}"
    each = [f"{one.name}:{blocks_digest(one.train)}" for one in config.data.sources]
    return f"blocks:{hashlib.sha256(' '.join(each).encode()).hexdigest()}"


class Hope:
    """Watches whether a set has rows enough that can be used: without them a run would issue tasks and end them for ever."""

    def __init__(self, num_rows: int) -> None:
        self._window = min(_HOPELESS_ROWS, num_rows)
        self._num = self._bad = 0

    def tell(self, num: int, refused: Sequence[Refused]) -> None:
        """`num` rows have come, and some of them were `refused`.

        Raises DataError when of 1000 rows that followed each other, or of a whole pass, more than 95 % could not be used.
        """
        self._num += num
        self._bad += len(refused)
        if self._num >= self._window:
            if self._bad > _HOPELESS_SHARE * self._num:
                raise _hopeless(refused[-1], self._bad, self._num)
            self._num = self._bad = 0


def _hopeless(one: Unusable | Refused, bad: int, num: int) -> DataError:
    own = one.hint if isinstance(one, Unusable) else ""
    return DataError(
        f"expected rows that can be used, got {bad} of {num} that cannot; one of them: {one.detail}",
        hint=own or "name the right fields in [data] (prompt_key, label_key ...), raise data.max_prompt_tokens, or mend the file",
        reason=one.reason,
        bad=bad,
        rows=num,
    )
