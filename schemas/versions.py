"""Policy versions: which weights sampled a token."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from streamrl.errors import SchemaError

_TEXT = re.compile(r"^(\d+)\.(\d+)$")


class Version(msgspec.Struct, frozen=True, order=True):
    """A policy version, ordered by epoch, then number.

    `number` counts the batches trained since the run began. `epoch` grows by one each time a restart could not
    re-derive bit-equal parameters for a number that had already been published, so that two different sets of
    weights never share a version.

    Example:
        >>> Version(0, 17).next() < Version(1, 3)
        True
        >>> Version.parse("1.3").number
        3
    """

    epoch: int = 0
    number: int = 0

    def __post_init__(self) -> None:
        if self.epoch < 0 or self.number < 0:
            raise SchemaError(f"a version needs epoch >= 0 and number >= 0, got {self.epoch}.{self.number}")

    def __str__(self) -> str:
        return f"{self.epoch}.{self.number}"

    def next(self) -> Version:
        """The version after one more trained batch."""
        return Version(self.epoch, self.number + 1)

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read `epoch.number`; raises SchemaError on anything else."""
        return _parsed(text)


@lru_cache(maxsize=1024)
def _parsed(text: str) -> Version:
    """Every completion of every answer names its versions, which are few."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise SchemaError(f"expected a version such as 0.17 (epoch.number), got {text!r}", version=text)
    return Version(int(match[1]), int(match[2]))
