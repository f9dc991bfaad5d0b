"""Tokens that have been sampled and of which nobody has said yet what became of them."""

from __future__ import annotations

from collections.abc import Mapping

_SAMPLED = "tokens/sampled_total"
_ENDED = ("tokens/published_total", "tokens/cut_total", "tokens/evaluated_total")


class Goodput:
    """Adds up reports: sampled = published + cut + evaluated + open.

    What a killed process had in hand, and had not reported yet, is open for ever. One process's reports may come before another's,
    so that a moment may have fewer than none.
    """

    def __init__(self) -> None:
        self.open = 0.0

    def add(self, sums: Mapping[str, float]) -> None:
        """The amounts of a report."""
        self.open += sums.get(_SAMPLED, 0.0) - sum(sums.get(name, 0.0) for name in _ENDED)
