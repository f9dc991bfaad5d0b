"""A configuration that is being written from flags: keys with the flags that they are from, and what is to be said of them."""

from __future__ import annotations

import os.path
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.bridges.slime.bash.builtins import is_nowhere
from streamrl.bridges.slime.bash.training import Training
from streamrl.bridges.slime.script.arguments import Arguments
from streamrl.bridges.slime.script.report import Finding, finding
from streamrl.bridges.slime.script.toml import Entry


class Options(msgspec.Struct, frozen=True):
    """What a script does not say, and its reader may."""

    num_rows: int = 0
    """Rows of the training data, for --num-epoch; 0: not said."""


class Draft:
    """Keys and tables so far, and findings beside those of the arguments."""

    def __init__(self, arguments: Arguments, training: Training, options: Options) -> None:
        self.arguments, self.training, self.options = arguments, training, options
        self.entries: dict[str, Entry] = {}
        self.sets: list[dict[str, Entry]] = []
        """`[[evaluation.sets]]`."""
        self.findings: list[Finding] = []
        self.flags: dict[str, tuple[str, ...]] = {}
        """By key, the flags that it is from, or would be."""
        self.used: set[str] = set()
        """Those that values are from, also values in tables."""
        self.spoken: set[str] = set()
        """Flags of which more was said than their table says, or of which nothing is to be said."""

    def put(self, key: str, value: Any, *flags: str, note: str = "") -> None:
        """A key, where the value is known: that of a flag is None where it was refused."""
        if value is None:
            return
        self.entries[key] = self.entry(value, *flags, note=note)
        self.flags[key] = flags

    def entry(self, value: Any, *flags: str, note: str = "") -> Entry:
        """The value with where it is from."""
        self.used |= {flag for flag in flags if self.arguments.on(flag)}
        given = [f"{self.arguments.given[flag].spelled}, {self._where(flag)}" for flag in flags if self.arguments.on(flag)]
        said = "; ".join(given) if given else f"slime's default of {flags[0]}" if flags else ""
        return Entry(value, "; ".join(filter(None, (said, note))))

    def _where(self, flag: str) -> str:
        place = self.arguments.given[flag].place
        return f"{os.path.basename(place.file)}:{place.line}"

    def get(self, key: str, default: Any = None) -> Any:
        """A value that was put."""
        return self.entries[key].value if key in self.entries else default

    def refuse(self, flag: str, says: str, nearest: str = "") -> None:
        """The flag, as it is given or because it is not, has no counterpart."""
        self.findings.append(finding("refused", self.spelled(flag), says, nearest, self.arguments.place(flag)))

    def say(self, flag: str, says: str) -> None:
        """The difference that a flag's value makes."""
        self.spoken.add(flag)
        self.findings.append(finding("approximated", self.spelled(flag), says, "", self.arguments.place(flag)))

    def assume(self, subject: str, says: str) -> None:
        """Something that the script does not say."""
        self.findings.append(finding("assumed", subject, says, "", self.arguments.place(subject)))

    def spelled(self, flag: str) -> str:
        """As the script has it."""
        return self.arguments.given[flag].spelled if self.arguments.on(flag) else flag

    def path(self, flag: str) -> str | None:
        """A path, absolute: the file of the configuration may lie elsewhere than the script is started."""
        text = self.arguments.text(flag)
        return None if text is None else self.absolute(flag, text)

    def absolute(self, flag: str, text: str) -> str | None:
        """A path of a flag's, absolute; None where it is refused."""
        if text.startswith(("/", "~")):
            return text
        if is_nowhere(self.training.cwd):
            self.refuse(
                flag, f"{text} is relative to a folder that is not known: the script goes there by cd", "write it as an absolute path"
            )
            return None
        return os.path.normpath(self.training.cwd / text)

    def tree(self) -> dict[str, Any]:
        """As a table of tables."""
        tree: dict[str, Any] = {}
        for key, entry in self.entries.items():
            _place(tree, key, entry.value)
        for one in self.sets:
            table: dict[str, Any] = {}
            for key, entry in one.items():
                _place(table, key, entry.value)
            tree.setdefault("evaluation", {}).setdefault("sets", []).append(table)
        return tree


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = dict(value) if isinstance(value, Mapping) else value
