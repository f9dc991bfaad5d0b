"""The rows of a set of problems, with errors that name the set."""

from __future__ import annotations

from msgspec.structs import replace

from streamrl.config.evaluation_sets import HELDOUT, ProblemSet
from streamrl.data.problems import Problems, load_problems
from streamrl.data.tokenizer import Tokenizer
from streamrl.errors import ConfigError


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
