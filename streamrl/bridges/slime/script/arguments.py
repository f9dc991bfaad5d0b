"""The words behind `train.py` as flags with values, read as argparse reads them, and asked for by type."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from streamrl.bridges.slime.bash.values import Field, Place, Unknown
from streamrl.bridges.slime.script.flag import Flag, canonical
from streamrl.bridges.slime.script.flags import ALIASES, FLAGS, find, nearest
from streamrl.bridges.slime.script.report import Finding, finding


class Given(NamedTuple):
    """A flag of the script."""

    flag: Flag
    """Of an alias: what is meant."""
    spelled: str
    values: tuple[Field, ...]
    place: Place


class Arguments:
    """The flags of a training command. What is wrong with them is gathered in `findings`.

    Args:
        words: those behind the script's name.
    """

    def __init__(self, words: Sequence[Field]) -> None:
        self.findings: list[Finding] = []
        self.given: dict[str, Given] = {}
        self.left_out: dict[str, Given] = {}
        self._read(words)

    def _read(self, words: Sequence[Field]) -> None:
        name, values, place = "", list[Field](), Place("", 0)
        for word in words:
            text = word.value if isinstance(word.value, str) else ""
            if text.startswith("--") and len(text) > 2:
                self._add(name, values, place)
                name, equals, value = text.partition("=")
                name, place = canonical(name), word.place
                values = [word._replace(value=value)] if equals else []
            elif isinstance(word.value, Unknown) and (word.many or not name or self._full(name, values)):
                self._refuse_unknown(word)
            elif not name:
                self._refuse(word.raw, "stands before the first flag", "write it behind its flag", word.place)
            else:
                values.append(word)
        self._add(name, values, place)

    def _full(self, name: str, values: Sequence[Field]) -> bool:
        flag = find(name)
        return flag is None or flag.kind == "switch" or (flag.kind in ("whole", "number", "text", "any") and len(values) > 0)

    def _refuse_unknown(self, word: Field) -> None:
        assert isinstance(word.value, Unknown)
        self._refuse(
            word.raw, f"these words are not known: {word.value.why}", word.value.hint or "write the flags into the script", word.place
        )

    def _refuse(self, subject: str, says: str, instead: str, place: Place | None) -> None:
        new = finding("refused", subject, says, instead, place)
        if new not in self.findings:
            self.findings.append(new)

    def _add(self, name: str, values: Sequence[Field], place: Place) -> None:
        if not name:
            return
        flag = find(name)
        if flag is None:
            close = nearest(name)
            self._refuse(name, "no flag of slime, Megatron or SGLang that is known here", f"did you mean {close}?" if close else "", place)
            return
        meant = FLAGS.get(ALIASES[name].flag, flag) if name in ALIASES else flag
        if name in ALIASES:
            self.findings.append(finding("approximated", name, ALIASES[name].says, "", place))
        self._check_count(flag, name, values, place)
        before = self.given.get(meant.name)
        if before is not None and meant.name == "--eval-prompt-data":  # slime would take the last; documents about it repeat the flag
            values = [*before.values, *values]
        elif before is not None and meant.name not in ("--rollout-sample-hook-path",):
            self.findings.append(finding("assumed", name, f"given at {before.place}, too; the last counts", "", place))
        self.given[meant.name] = Given(meant, name, tuple(values), place)

    def _check_count(self, flag: Flag, name: str, values: Sequence[Field], place: Place) -> None:
        if flag.kind == "switch" and values:
            self._refuse(name, f"takes no value, got {values[0].raw!r}", "leave the value out", place)
        elif flag.kind in ("whole", "number", "text") and len(values) != 1:
            got = ", ".join(repr(one.raw) for one in values) or "none"
            self._refuse(name, f"takes one value, got {got}", "", place)
        elif flag.kind in ("wholes", "texts") and not values and not name.startswith("--sglang-"):
            self._refuse(name, "takes a value, got none", "", place)

    def leave_out(self, name: str) -> None:
        """As if it were not in the script."""
        if name in self.given:
            self.left_out[name] = self.given.pop(name)

    def place(self, name: str) -> Place | None:
        """Where a flag is given."""
        return self.given[name].place if name in self.given else None

    def on(self, name: str) -> bool:
        """Whether a flag is given."""
        return name in self.given

    def text(self, name: str) -> str | None:
        """Its value, slime's default, or None."""
        if name not in self.given:
            return FLAGS[name].default
        values = self.texts(name)
        return values[0] if len(values) == 1 else None

    def texts(self, name: str) -> list[str]:
        """All its values; none where one is not known, which is then refused."""
        found: list[str] = []
        for field in self.given[name].values if name in self.given else ():
            if isinstance(field.value, Unknown):
                self._refuse(self.given[name].spelled, f"{field.raw} is not known: {field.value.why}", field.value.hint, field.place)
                return []
            found.append(field.value)
        return found

    def whole(self, name: str, *, least: int | None = None) -> int | None:
        """A whole number, slime's default, or None."""
        if name not in self.given:
            return FLAGS[name].default
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"[+-]?\d{1,15}", text) or (least is not None and int(text) < least):
            bound = "" if least is None else f" of at least {least}"
            self._refuse(self.given[name].spelled, f"takes a whole number{bound}, got {text!r}", "", self.place(name))
            return None
        return int(text)

    def wholes(self, name: str) -> list[int]:
        """Whole numbers."""
        texts = self.texts(name)
        if wrong := [text for text in texts if not re.fullmatch(r"\d{1,15}", text)]:
            self._refuse(name, f"takes whole numbers, got {wrong[0]!r}", "", self.place(name))
            return []
        return [int(text) for text in texts]

    def number(self, name: str) -> float | None:
        """A finite number, slime's default, or None."""
        if name not in self.given:
            return FLAGS[name].default
        text = self.text(name)
        try:
            value = float(text) if text is not None else None
        except ValueError:
            value = math.nan
        if value is not None and not math.isfinite(value):
            self._refuse(self.given[name].spelled, f"takes a number, got {text!r}", "", self.place(name))
            return None
        return value
