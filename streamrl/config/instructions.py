"""Which instructions `ifbench` and `ifeval` know, and what each takes: rows are checked by it before the checkers are loaded.

The ids and the names of arguments are those of IFBench (arXiv 2507.02833) and IFEval (arXiv 2311.07911), as the package if-verifiable has
them. Its checkers draw at random what a row leaves open, and leave out ids that they do not know; neither is a reward.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from streamrl.errors import SchemaError

IDS, KWARGS = "instruction_id_list", "kwargs"
"""Fields of a row's metadata, as the data sets of both have them."""
_HINT = "docs/rewards.md says what ifbench and ifeval read of a row"


class _Takes(NamedTuple):
    words: str
    fits: Callable[[Any], bool]


def _is_count(given: Any, least: int = 0) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and given >= least


def _is_text(given: Any) -> bool:
    return isinstance(given, str) and bool(given.strip())


_COUNT = _Takes("a whole number of at least 0", _is_count)
_PLACE = _Takes("a whole number of at least 1", lambda given: _is_count(given, 1))
_TEXT = _Takes("a text", _is_text)
_TEXTS = _Takes("a list of texts", lambda given: isinstance(given, list | tuple) and bool(given) and all(map(_is_text, given)))
_LETTER = _Takes("a letter from a to z", lambda given: isinstance(given, str) and len(given) == 1 and given.isascii() and given.isalpha())
_RELATION = _Takes("'less than' or 'at least'", lambda given: given in ("less than", "at least"))
_Table = Mapping[str, Mapping[str, _Takes]]

_IFBENCH: dict[str, dict[str, _Takes]] = {
    "count:conjunctions": {"small_n": _COUNT},
    "count:keywords_multiple": dict.fromkeys(("keyword1", "keyword2", "keyword3", "keyword4", "keyword5"), _TEXT),
    "count:numbers": {"N": _COUNT},
    "count:person_names": {"N": _COUNT},
    "count:pronouns": {"N": _COUNT},
    "count:unique_word_count": {"N": _COUNT},
    "count:word_count_range": {"min_words": _COUNT, "max_words": _COUNT},
    "count:words_japanese": {"N": _PLACE},
    "format:list": {"sep": _TEXT},
    "format:options": {"options": _TEXT},
    "ratio:overlap": {"reference_text": _TEXT, "percentage": _COUNT},
    "ratio:stop_words": {"percentage": _COUNT},
    "repeat:repeat_change": {"prompt_to_repeat": _TEXT},
    "repeat:repeat_span": {"prompt_to_repeat": _TEXT, "n_start": _COUNT, "n_end": _PLACE},
    "sentence:increment": {"small_n": _COUNT},
    "sentence:keyword": {"word": _TEXT, "N": _PLACE},
    "words:keywords_specific_position": {"keyword": _TEXT, "n": _PLACE, "m": _PLACE},
    "words:repeats": {"small_n": _COUNT},
    "words:words_position": {"keyword": _TEXT},
}
_IFBENCH_BARE = (
    "count:punctuation custom:character_reverse custom:csv_city custom:csv_quotes custom:csv_special_character custom:date_format_list "
    "custom:european_capitals_sort custom:mcq_count_length custom:multiples custom:reverse_newline custom:sentence_alphabet "
    "custom:word_reverse format:emoji format:line_indent format:newline format:no_bullets_bullets format:no_whitespace "
    "format:output_template format:parentheses format:quote_unquote format:quotes format:sub-bullets format:thesis format:title_case "
    "ratio:sentence_balance ratio:sentence_type ratio:sentence_words repeat:repeat_simple sentence:alliteration_increment words:alphabet "
    "words:consonants words:last_first words:no_consecutive words:odd_even_syllables words:palindrome words:paragraph_last_first "
    "words:prime_lengths words:start_verb words:vowel"
)
_IFEVAL: dict[str, dict[str, _Takes]] = {
    "change_case:capital_word_frequency": {"capital_frequency": _COUNT, "capital_relation": _RELATION},
    "combination:repeat_prompt": {"prompt_to_repeat": _TEXT},
    "detectable_content:number_placeholders": {"num_placeholders": _COUNT},
    "detectable_content:postscript": {"postscript_marker": _TEXT},
    "detectable_format:multiple_sections": {"section_spliter": _TEXT, "num_sections": _COUNT},
    "detectable_format:number_bullet_lists": {"num_bullets": _COUNT},
    "detectable_format:number_highlighted_sections": {"num_highlights": _COUNT},
    "keywords:existence": {"keywords": _TEXTS},
    "keywords:forbidden_words": {"forbidden_words": _TEXTS},
    "keywords:frequency": {"keyword": _TEXT, "frequency": _COUNT, "relation": _RELATION},
    "keywords:letter_frequency": {"letter": _LETTER, "let_frequency": _COUNT, "let_relation": _RELATION},
    "language:response_language": {"language": _TEXT},
    "length_constraints:nth_paragraph_first_word": {"num_paragraphs": _COUNT, "nth_paragraph": _PLACE, "first_word": _TEXT},
    "length_constraints:number_paragraphs": {"num_paragraphs": _COUNT},
    "length_constraints:number_sentences": {"num_sentences": _COUNT, "relation": _RELATION},
    "length_constraints:number_words": {"num_words": _COUNT, "relation": _RELATION},
    "startend:end_checker": {"end_phrase": _TEXT},
}
_IFEVAL_BARE = (
    "change_case:english_capital change_case:english_lowercase combination:two_responses detectable_format:constrained_response "
    "detectable_format:json_format detectable_format:title punctuation:no_comma startend:quotation"
)
INSTRUCTIONS: Mapping[str, _Table] = MappingProxyType(
    {
        "ifbench": {**_IFBENCH, **{name: {} for name in _IFBENCH_BARE.split()}},
        "ifeval": {**_IFEVAL, **{name: {} for name in _IFEVAL_BARE.split()}},
    }
)
"""By kind of reward, by id: the arguments that are needed, all of them."""


def instructions_of(kind: str, metadata: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The instructions of a row, each with all its arguments; numbers such as `3.0`, which tables with gaps have, are whole.

    Args:
        kind: `ifbench` or `ifeval`.
        metadata: of the row, with `instruction_id_list` and as many `kwargs` (a null in them is an argument that is not there); other
            entries are not looked at.

    Raises:
        SchemaError: there is none, one is not known, or an argument is missing, not known, or of a wrong type. Who calls says which row.
    """
    ids, given = metadata.get(IDS), metadata.get(KWARGS)
    if not isinstance(ids, list | tuple) or not ids or not all(isinstance(one, str) for one in ids):
        hint = f"data.metadata_key names the field of the rows with {IDS} and {KWARGS}; docs/rewards.md shows a row"
        raise SchemaError(f"expected a list of instructions as metadata.{IDS}, got {ids!r:.80}", hint=hint)
    if not isinstance(given, list | tuple) or len(given) != len(ids):
        got = f"{len(given)} for {len(ids)} instructions" if isinstance(given, list | tuple) else f"{given!r:.80}"
        raise SchemaError(f"expected a table for each instruction as metadata.{KWARGS}, got {got}", hint=_HINT)
    return [(one, _arguments(kind, one, table)) for one, table in zip(ids, given, strict=True)]


def _arguments(kind: str, name: str, table: Any) -> dict[str, Any]:
    known = INSTRUCTIONS[kind].get(name)
    if known is None:
        near = difflib.get_close_matches(name, INSTRUCTIONS[kind], n=1)
        other = [other for other, table in INSTRUCTIONS.items() if name in table]
        nearest = f" (one of {other[0]})" if other else f" (did you mean {near[0]!r}?)" if near else ""
        hint = f"there are {', '.join(sorted(INSTRUCTIONS[kind]))}"
        raise SchemaError(f"expected an instruction of {kind}, got {name!r:.80}{nearest}", hint=hint)
    if table is not None and not isinstance(table, Mapping):
        raise SchemaError(f"{name}: expected a table of arguments, got {table!r:.80}", hint=_HINT)
    given = {argument: _whole(value) for argument, value in (table or {}).items() if value is not None}
    if set(given) != set(known):
        wanted = ", ".join(known) or "no arguments"
        raise SchemaError(f"{name}: expected {wanted} in its {KWARGS}, got {', '.join(sorted(map(str, given))) or 'none'}", hint=_HINT)
    for argument, takes in known.items():
        if not takes.fits(given[argument]):
            raise SchemaError(f"{name}: expected {takes.words} as {argument}, got {given[argument]!r:.80}", hint=_HINT)
    return given


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
