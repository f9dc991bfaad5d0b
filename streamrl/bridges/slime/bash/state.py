"""Variables, arrays and functions of a script at one of its lines."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from streamrl.bridges.slime.bash.syntax import Node, Source
from streamrl.bridges.slime.bash.values import Field, Place, Unknown, Value
from streamrl.errors import ConfigError

LONGEST = 1 << 16
"""Characters of a variable, and elements of an array."""
_DEEPEST = 20
"""Expansions within one another."""
_WORK = 200_000
"""Statements, and what they copy, before a script is given up."""


class Budget:
    """Bounds the work that a script may ask for: what it builds may double with each line."""

    def __init__(self) -> None:
        self._left = _WORK
        self._depth = 0

    @contextmanager
    def deeper(self, place: Place) -> Generator[None]:
        """Within an expansion; raises ConfigError for too many within one another."""
        self._depth += 1
        try:
            if self._depth > _DEEPEST:
                raise ConfigError(
                    f"expected at most {_DEEPEST} expansions within one another at {place}",
                    hint="take them apart, by variables of their own",
                    path=place.file,
                    line=place.line,
                )
            yield
        finally:
            self._depth -= 1

    def spend(self, amount: int, place: Place) -> None:
        """Raise ConfigError once too much is spent."""
        self._left -= amount
        if self._left < 0:
            raise ConfigError(
                f"expected a training script, got one that does not come to an end within {_WORK:,} steps of reading, at {place}",
                hint="hand over the script that has the arguments, without what is around it",
                path=place.file,
                line=place.line,
            )


class Function(NamedTuple):
    """A function; its lines are those of the file that defines it, whoever calls it."""

    body: Node
    source: Source


@dataclass
class State:
    """What is known. Nothing comes from the environment."""

    scalars: dict[str, Value]
    arrays: dict[str, list[Field] | Unknown]
    functions: dict[str, Function]
    arguments: list[Field]
    cwd: Path
    script: str
    """`$0`, in sourced files too."""
    foreign: Unknown | None = None
    """Something that was not read may have set names that the script does not."""
    changed: set[str] = field(default_factory=set[str])
    """Names that were assigned since this was last emptied."""

    @classmethod
    def first(cls, script: Path, variables: Mapping[str, str], arguments: Iterable[str], cwd: Path) -> State:
        """Before the first line."""
        place = Place("the command line", 1)
        return cls(dict(variables), {}, {}, [Field(one, place, one) for one in arguments], cwd, str(script))

    def copied(self) -> State:
        """For a branch or a sub-shell."""
        arrays = {name: list(fields) if isinstance(fields, list) else fields for name, fields in self.arrays.items()}
        return replace(
            self, scalars=dict(self.scalars), arrays=arrays, functions=dict(self.functions), arguments=list(self.arguments), changed=set()
        )

    @property
    def size(self) -> int:
        """What a copy costs."""
        return 1 + len(self.scalars) + sum(len(fields) for fields in self.arrays.values() if isinstance(fields, list))

    def get(self, name: str) -> Value | None:
        """A variable, of an array its first element; None where it is not set."""
        if name in self.scalars:
            return self.scalars[name]
        if (fields := self.arrays.get(name)) is not None:
            return fields if isinstance(fields, Unknown) else fields[0].value if fields else None
        return self.foreign

    def fields(self, name: str) -> list[Field] | Unknown | None:
        """An array, or a variable as one of one element; None where it is not set."""
        if name in self.arrays:
            return self.arrays[name]
        value = self.get(name)
        if value is None or (isinstance(value, Unknown) and name not in self.scalars):
            return value
        return [Field(value, Place("", 0), f"${{{name}}}")]

    def set(self, name: str, value: Value | list[Field], place: Place) -> None:
        """Assign; raises ConfigError for what is too long to be meant."""
        if not isinstance(value, Unknown) and len(value) > LONGEST:
            raise ConfigError(
                f"expected at most {LONGEST:,} characters or words in {name}, got {len(value):,} at {place}",
                hint="a script that builds such texts is not read",
                line=place.line,
            )
        self.scalars.pop(name, None)
        self.arrays.pop(name, None)
        if isinstance(value, list):
            self.arrays[name] = value
        else:
            self.scalars[name] = value
        self.changed.add(name)

    def forget(self, name: str, unknown: Unknown, *, array: bool) -> None:
        """What it holds now is decided by something that is not in the text."""
        self.scalars.pop(name, None)
        self.arrays.pop(name, None)
        if array:
            self.arrays[name] = unknown
        else:
            self.scalars[name] = unknown
        self.changed.add(name)

    def unset(self, name: str) -> None:
        """As `unset` does."""
        self.scalars.pop(name, None)
        self.arrays.pop(name, None)
        self.changed.add(name)
