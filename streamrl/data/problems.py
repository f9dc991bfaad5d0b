"""Rows made ready for tasks: prompt token ids, label, tools and metadata, checked and filtered by length."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from streamrl.config.evaluation_sets import HELDOUT, ProblemSet
from streamrl.config.reward import row_reward
from streamrl.config.tree import DataConfig
from streamrl.data.conversations import split
from streamrl.data.formats import place_of
from streamrl.data.images import ImageReader, RowImage, has_image_parts
from streamrl.data.messages import plain_messages, plain_tools
from streamrl.data.order import row_of
from streamrl.data.rows import BadRows, digest, open_rows
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import ConfigError, DataError, SchemaError
from streamrl.schemas.tasks import RewardSpec, Sampling, turn_sampling

logger = logging.getLogger(__name__)

TOO_LONG = "row_too_long"
"""Reason of a tombstone: the prompt of the task's row has more than `data.max_prompt_tokens` tokens."""
BROKEN = "row_broken"
"""Reason of a tombstone: the task's row cannot be read, or lacks what a task needs."""
WITH_IMAGES = 16
"""Rows that are held at a time where each may have `data.max_image_bytes`."""
_CHUNK = 1024
_NAMED = 3
"""Rows beyond the limit whose places are told."""
_AS_IT_IS = "with data.chat_template = false"
_BASE = "write prompts as texts, with data.chat_template = false, or put a chat_template.jinja beside the tokenizer"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """One row as a task needs it."""

    row: int
    """Index among the problems of its file."""
    line: int
    """1-based line of the file."""
    prompt_ids: tuple[int, ...]
    prompt: Any
    """As the file has it: a string, or a list of chat messages."""
    label: Any = None
    tools: Any = None
    metadata: dict[str, Any] = {}
    chat_template_kwargs: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """The row's own, where it has some."""
    sampling: dict[str, Any] = {}
    """Fields of `Sampling` for this row, checked one by one."""
    reward: RewardSpec | msgspec.UnsetType = msgspec.UNSET
    """The row's own, where it has one."""
    images: tuple[RowImage, ...] = ()


class Unusable(msgspec.Struct, frozen=True, kw_only=True):
    """A row whose tasks end as they are issued."""

    row: int
    reason: str
    """TOO_LONG or BROKEN."""
    detail: str
    """What was expected and got, with file and line."""
    hint: str = ""
    """Advice, empty where there is none in particular."""


class TaskRows(Protocol):
    """What tasks are made of."""

    def __len__(self) -> int: ...

    @property
    def digest(self) -> str: ...

    def order(self, seed: int, place: int, *, shuffle: bool) -> tuple[int, int]:
        """(pass, row) of the place-th item of endless passes."""
        ...

    def take(self, rows: Sequence[int]) -> list[Problem | Unusable]:
        """Those rows, in their order. May read files."""
        ...


class Problems(msgspec.Struct, frozen=True, kw_only=True):
    """The problems of one file, read whole. `digest` covers all used rows, those that are too long included."""

    problems: tuple[Problem, ...]
    digest: str
    num_too_long: int = 0
    first_too_long: str = ""
    """Where the first few of these rows are, in words."""

    def left_out(self, key: str, max_prompt_tokens: int) -> str:
        """Return the words for the rows whose prompts are too long, of the set under a `key`; empty: there are none."""
        if not self.num_too_long:
            return ""
        return (
            f"{key}: {self.num_too_long} of {self.num_too_long + len(self)} rows are left out: their prompts are longer than "
            f"data.max_prompt_tokens = {max_prompt_tokens}; the first: {self.first_too_long}"
        )

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> Problem:
        return self.problems[index]

    def order(self, seed: int, place: int, *, shuffle: bool) -> tuple[int, int]:
        """See TaskRows."""
        return row_of(seed, place, len(self.problems), shuffle=shuffle)

    def take(self, rows: Sequence[int]) -> list[Problem | Unusable]:
        """See TaskRows."""
        return [self.problems[row] for row in rows]


def load_problems(path: str, config: DataConfig, tokenizer: Tokenizer) -> Problems:
    """Read, check and encode the rows of `path` (with an optional `@[a:b]`), leaving out prompts beyond `max_prompt_tokens`.

    Raises DataError that names file and line of the first bad row, and counts them: no such file, malformed line, a prompt or label that
    is missing, a value of a wrong type, a prompt without a token, no problem left. Raises ConfigError for variables that the chat template
    does not read.
    """
    if config.chat_template:
        tokenizer.check_template_kwargs(config.chat_template_kwargs)
    rows = open_rows(path)
    problems: list[Problem] = []
    too_long: list[int] = []
    bad = BadRows(len(rows))
    for first in range(0, len(rows), _CHUNK):
        read: list[Problem] = []
        texts: list[str] = []
        for index in range(first, min(first + _CHUNK, len(rows))):
            with bad:
                problem = read_problem(rows[index], config, row_number=index, line=rows.line(index), path=rows.path)
                texts.append(problem_text(problem, config, tokenizer, rows.path))
                read.append(problem)
        encoded = tokenizer.encode_many(texts, add_special_tokens=not config.chat_template)
        for problem, ids in zip(read, encoded, strict=True):
            with bad:
                if not ids:
                    raise no_token(problem, config, rows.path)
            if len(ids) > config.max_prompt_tokens:
                too_long.append(problem.line)
                continue
            problems.append(msgspec.structs.replace(problem, row=len(problems), prompt_ids=tuple(ids)))
    bad.check()
    if not problems:
        raise DataError(
            f"expected a prompt of at most {config.max_prompt_tokens} tokens in {path}, got {len(too_long)} that are all longer",
            hint="raise data.max_prompt_tokens",
            path=rows.path,
            max_prompt_tokens=config.max_prompt_tokens,
        )
    first_too_long = ", ".join(place_of(rows.path, line) for line in too_long[:_NAMED])
    if too_long:
        kept, most = len(problems), config.max_prompt_tokens
        said = "event=prompts_left_out path=%s too_long=%d kept=%d max_prompt_tokens=%d first=%s"
        logger.warning(said, path, len(too_long), kept, most, first_too_long)
    return Problems(problems=tuple(problems), digest=digest(rows), num_too_long=len(too_long), first_too_long=first_too_long)


def prompt_text(
    prompt: Any, config: DataConfig, tokenizer: Tokenizer, *, tools: Any = None, template_kwargs: Mapping[str, Any] | None = None
) -> str:
    """The text a prompt is encoded from: through the chat template (a string is one user message), or the string as it is.

    `template_kwargs` are the row's own, over those of `config`.
    """
    untold = not isinstance(prompt, str) and not tokenizer.chat_template
    if untold or not (config.chat_template or isinstance(prompt, str)):
        raise ConfigError(
            f"expected a text as prompt {'of a model without a chat template' if untold else _AS_IT_IS}, got chat messages",
            hint=_BASE if untold else "leave data.chat_template out: true is its default; or write the prompts as texts",
            key="data.chat_template",
        )
    if not config.chat_template:
        return prompt
    messages: Sequence[Any] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    given = {**config.chat_template_kwargs, **(template_kwargs or {})}
    tokenizer.check_shown(messages, tools, given)
    return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, template_kwargs=given)


def problem_text(problem: Problem, config: DataConfig, tokenizer: Tokenizer, path: str) -> str:
    """`prompt_text` of a row; raises DataError that names it."""
    try:
        return prompt_text(problem.prompt, config, tokenizer, tools=problem.tools, template_kwargs=problem.chat_template_kwargs or None)
    except (ConfigError, SchemaError) as error:
        values = error.values | {"path": path, "line": problem.line}
        raise DataError(f"{error.message}, at {place_of(path, problem.line)}", hint=error.hint, **values) from error


def no_token(problem: Problem, config: DataConfig, path: str) -> DataError:
    """The error of a prompt that is encoded to nothing."""
    return _wrong({config.prompt_key: problem.prompt}, config, "prompt_key", "a prompt of at least one token", path, problem.line)


def read_problem(row: dict[str, Any], config: DataConfig, *, row_number: int, line: int, path: str) -> Problem:
    """A row as a problem that is not encoded yet; raises DataError for a value that is missing or of a wrong type."""

    def wrong(option: str, expected: str) -> DataError:
        return _wrong(row, config, option, expected, path, line)

    prompt, label = (_conversation if config.messages_key else _prompt)(row, config, wrong)
    prompt, images = _images(row, prompt, config, wrong, path, line)
    prompt, label, tools = _plain(row, prompt, label, config, path, line)
    metadata = (row.get(config.metadata_key) if config.metadata_key else None) or {}
    if not isinstance(metadata, dict):
        raise wrong("metadata_key", "a table")
    given = (row.get(config.chat_template_kwargs_key) if config.chat_template_kwargs_key else None) or {}
    if not isinstance(given, dict):
        raise wrong("chat_template_kwargs_key", "a table")
    said = (row.get(config.sampling_key) if config.sampling_key else None) or {}
    if not isinstance(said, dict):
        raise wrong("sampling_key", "a table")
    # Parquet gives each row all fields of the table.
    given = {name: value for name, value in given.items() if value is not None}
    return Problem(
        row=row_number,
        line=line,
        prompt_ids=(),
        prompt=prompt,
        label=label,
        tools=tools,
        metadata=metadata,
        chat_template_kwargs=given or msgspec.UNSET,
        sampling=_sampling({name: value for name, value in said.items() if value is not None}, config, path, line),
        reward=_reward(row, config, path, line),
        images=images,
    )


Wrong = Callable[[str, str], DataError]
"""The error for an option's field, and what was expected there."""


def _prompt(row: dict[str, Any], config: DataConfig, wrong: Wrong) -> tuple[Any, Any]:
    prompt = row.get(config.prompt_key)
    if not isinstance(prompt, str) and not _are_messages(prompt):
        raise wrong("prompt_key", "a string or a list of chat messages")
    if prompt == "":
        raise wrong("prompt_key", "a prompt")
    label = row.get(config.label_key) if config.label_key else None
    if config.label_key and label is None:
        raise wrong("label_key", "a label")
    return prompt, label


def _conversation(row: dict[str, Any], config: DataConfig, wrong: Wrong) -> tuple[Any, Any]:
    """What stands before the assistant's first turn, and the rest as the label."""
    messages = row.get(config.messages_key)
    if messages is None or not _are_messages(messages):
        raise wrong("messages_key", "a list of chat messages")
    head, answer = split(messages)
    if not head or not answer:
        raise wrong("messages_key", "a message for the assistant and a turn of the assistant's after it")
    return head, answer


def _plain(row: dict[str, Any], prompt: Any, label: Any, config: DataConfig, path: str, line: int) -> tuple[Any, Any, Any]:
    """Prompt, label and tools in the one form in which tasks have them, whatever the form of the file."""
    option = "messages_key" if config.messages_key else "prompt_key"
    try:
        if not isinstance(prompt, str):
            num = len(prompt)
            prompt = plain_messages(prompt)
            label = plain_messages(label, first=num + 1) if config.messages_key else label
        option = "tools_key"
        tools = plain_tools(row.get(config.tools_key)) if config.tools_key else None
        option = "label_key"
        _check_numbers(label)
        option = "metadata_key"
        _check_numbers((row.get(config.metadata_key) if config.metadata_key else None), nan=True)
    except SchemaError as error:
        raise DataError(
            f"{error.message}, under {getattr(config, option)!r} at {place_of(path, line)}",
            hint=error.hint,
            **(error.values | {"path": path, "line": line, "key": f"data.{option}"}),
        ) from error
    return prompt, label, tools


def _check_numbers(value: Any, *, nan: bool = False) -> None:
    """Raise SchemaError for a number that no answer equals, NaN unless `nan` says that it may be there, or that a task cannot carry."""
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            _check_numbers(one, nan=nan)
    elif isinstance(value, float) and math.isnan(value) and not nan:
        raise SchemaError(
            "expected a label, got NaN, which no answer equals", hint="pandas writes NaN for what is missing: leave the row out", got="NaN"
        )
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise SchemaError(f"expected an integer of at most 64 bits, got {str(value)[:40]}", hint="write it as text, in quotes", got="int")


def _images(row: dict[str, Any], prompt: Any, config: DataConfig, wrong: Wrong, path: str, line: int) -> tuple[Any, tuple[RowImage, ...]]:
    """The prompt as a text or messages of texts, and the row's images."""
    key, in_parts = config.images_key, has_image_parts(prompt)
    if not key and not in_parts:
        return prompt, ()
    if key and key not in row and not in_parts:
        raise wrong("images_key", "images, or null for none,")
    try:
        if not key:
            raise DataError("expected messages without images, got one", hint="set data.images_key where a producer function looks at them")
        folder = Path(config.images_folder or path)
        reader = ImageReader(folder if folder.is_dir() else folder.parent, config.max_image_bytes)
        return reader.read(row.get(key), prompt)
    except DataError as error:
        raise DataError(
            f"{error.message}, at {place_of(path, line)}",
            hint=error.hint or "mend the row; docs/data.md says how rows have images",
            path=path,
            line=line,
            key="data.images_key",
        ) from error


def _sampling(said: dict[str, Any], config: DataConfig, path: str, line: int) -> dict[str, Any]:
    try:
        turn_sampling(Sampling(), said)
    except SchemaError as error:
        raise DataError(
            f"{error.message}, under {config.sampling_key!r} at {place_of(path, line)}",
            hint="fix the row; docs/configuration.md has the fields of sampling",
            path=path,
            line=line,
            key="data.sampling_key",
        ) from error
    return said


def _reward(row: dict[str, Any], config: DataConfig, path: str, line: int) -> RewardSpec | msgspec.UnsetType:
    said = row.get(config.reward_key) if config.reward_key else None
    if said is None:
        return msgspec.UNSET
    try:
        return row_reward(said, config.reward_options)
    except ConfigError as error:
        raise DataError(
            f"{error.message}, under {config.reward_key!r} at {place_of(path, line)}",
            hint=error.hint,
            path=path,
            line=line,
            key="data.reward_key",
        ) from error


def _wrong(row: dict[str, Any], config: DataConfig, option: str, expected: str, path: str, line: int) -> DataError:
    key = getattr(config, option)
    if row.get(key) is None:
        found = f"none (the row has: {', '.join(sorted(row))})"
    else:
        found = {"": "an empty text", "[]": "an empty list"}.get(str(row[key]), f"a {type(row[key]).__name__}")
    return DataError(
        f"expected {expected} under {key!r} at {place_of(path, line)}, got {found}",
        hint=f"fix the row, or name the right field in data.{option}",
        path=path,
        line=line,
        key=f"data.{option}",
        got=type(row.get(key)).__name__,
    )


def _are_messages(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(each, dict) and "role" in each for each in prompt)


def load_set(one: ProblemSet, tokenizer: Tokenizer) -> Problems:
    """All problems of a set; raises DataError and ConfigError as `load_problems`, which say of which set.

    What is asked has a prompt and a label, also where whole conversations are trained on.
    """
    try:
        return load_problems(one.path, replace(one.config.data, messages_key=""), tokenizer)
    except ConfigError as error:
        if one.name == HELDOUT:
            raise
        raise type(error)(f"{one.key}: {error.message}", hint=error.hint, **error.values) from error


def left_out(one: ProblemSet, rows: Problems) -> list[str]:
    """What of a set's rows is not asked, in words: prompts that are too long, rows beyond its `num_problems`; empty: all are."""
    too_long = rows.left_out(one.key, one.config.data.max_prompt_tokens)
    found = [too_long] if too_long else []
    if len(rows) > one.num_problems:
        found.append(
            f"{one.key}: the first {one.num_problems} of {len(rows)} rows are asked: its num_problems, or evaluation's, is the limit"
        )
    return found
