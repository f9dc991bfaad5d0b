"""`gpqa`: a question with choices (GPQA, arXiv 2311.12022): the letter that a completion chooses."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from streamrl.errors import SchemaError
from streamrl.rewards.answers import answering, last_box
from streamrl.rewards.protocol import RewardValue, ScoredEpisode
from streamrl.schemas.tasks import RolloutTask

_DEFAULT = "ABCDEFGHIJ"
_MARKER = re.compile(r"\b(?:answer|choice|option)\b(?:\s{1,8}is\b)?\s{0,8}[:=]?\s{0,8}", re.IGNORECASE)
_MOST_MARKERS = 50
_LINE = 2000
"""Characters behind a marker that are looked at."""
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm)\s{0,8}\{([^{}]{0,200})\}")


class Gpqa:
    """1.0 where the letter is the label's; parts `answer` and `answered` (a letter was found).

    The row's metadata may have `choices` (texts), `valid_letters` (of them; from A on otherwise) and `correct_letter`, which goes before
    the label.
    """

    in_children: ClassVar[bool] = False

    def grade(self, task: RolloutTask, episode: ScoredEpisode) -> RewardValue:
        """1.0 or 0.0; reasoning up to `</think>` is left out."""
        choices = [str(choice) for choice in task.metadata.get("choices") or ()]
        letters = _letters(task, choices)
        wanted = _wanted(task, letters, choices)
        text = answering(episode)
        found = None if text is None else chosen(text, letters, choices)
        return RewardValue(float(found == wanted), {"answer": float(found == wanted), "answered": float(found is not None)})


def letter_of(text: str, metadata: Mapping[str, Any]) -> str | None:
    """The letter that a text, without reasoning, chooses of those of its row; None where it chooses none."""
    choices = [str(choice) for choice in metadata.get("choices") or ()]
    return chosen(text, _said(metadata, choices), choices)


def chosen(text: str, letters: str, choices: Sequence[str] = ()) -> str | None:
    """The letter of the last box, else behind the last `answer is` (or `Answer:`, `option`), else the last that stands alone.

    A letter is an upper-case one with no letter or digit beside it; one of lower case counts in brackets, or where nothing else stands.
    The text of a choice counts as its letter, in a box, behind a marker, or as the whole completion.
    """
    box = last_box(text)
    places = [box] if box is not None else []
    markers = list(_MARKER.finditer(text))[-_MOST_MARKERS:]
    places += [text[match.end() : match.end() + _LINE].partition("\n")[0] for match in reversed(markers)]
    for place in places:
        if found := _at_once(place, letters, choices):
            return found
    if found := _at_once(text, letters, choices, words="AI"):
        return found
    alone = re.findall(rf"(?<![\w'\u2019])(?:\(([{letters}])\)|([{letters}]))(?![\w'\u2019])(?!\s+[a-z])", text)
    return next((one or other for one, other in reversed(alone)), None)


def _at_once(place: str, letters: str, choices: Sequence[str], words: str = "") -> str | None:
    """The letter that a text begins with, or the choice that it is; one of `words` with a word behind it is no letter, as in "I think"."""
    place = _WRAPPED.sub(r"\1", place).strip().lstrip("*_$ ").rstrip("*_$. ")
    plain = _plain(place)
    either = letters + letters.lower()
    found = re.match(rf"[(\[]([{either}])[)\]]|([{letters}])(?![\w'\u2019])|([{either}])$", place)
    if found:
        letter = next(group for group in found.groups() if group).upper()
        if found[2] not in tuple(words) or not re.match(r"\s+\w", place[found.end() :]):
            return letter
    return next((letter for letter, choice in zip(letters, choices, strict=False) if plain and _plain(choice) == plain), None)


def _said(metadata: Mapping[str, Any], choices: Sequence[str]) -> str:
    given = metadata.get("valid_letters")
    return "".join(str(letter) for letter in given).upper() if given else _DEFAULT[: len(choices)] if choices else _DEFAULT


def _letters(task: RolloutTask, choices: Sequence[str]) -> str:
    given, letters = task.metadata.get("valid_letters"), _said(task.metadata, choices)
    if not letters or set(letters) - set(string.ascii_uppercase) or len(set(letters)) < len(letters):
        raise _wrong(task, "different letters from A to Z as metadata.valid_letters (at most 10 choices without)", given or len(choices))
    if len(choices) > len(letters):
        raise _wrong(task, f"a letter for each of {len(choices)} choices", letters)
    return letters


def _wanted(task: RolloutTask, letters: str, choices: Sequence[str]) -> str:
    """The letter that is right: `correct_letter`, a letter, the text of a choice, or its index from 0."""
    label: Any = task.metadata.get("correct_letter") or task.label
    if isinstance(label, int) and not isinstance(label, bool) and 0 <= label < len(letters):
        return letters[label]
    if isinstance(label, str):
        bare = label.strip().strip("()[].").upper()
        if len(bare) == 1 and bare in letters:
            return bare
        if (plain := _plain(label)) and (texts := [_plain(choice) for choice in choices]).count(plain) == 1:
            return letters[texts.index(plain)]
        if label.strip().isascii() and label.strip().isdigit() and int(label) < len(letters):
            return letters[int(label)]
    raise _wrong(task, f"a label that is a letter of {letters}, the text of one choice, or an index from 0", label)


def _plain(text: str) -> str:
    return " ".join(text.lower().split()).strip(" .")


def _wrong(task: RolloutTask, expected: str, got: object) -> SchemaError:
    hint = "docs/rewards.md says what gpqa reads of a row"
    return SchemaError(f"row {task.row}: expected {expected}, got {got!r:.80}", hint=hint, row=task.row)
