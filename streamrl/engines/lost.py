"""The count of what an engine has sampled in vain."""

from __future__ import annotations

from streamrl.core.lengths import added, histogram


class Lost:
    """Tokens that an engine has sampled for nobody: their request was left, or failed, before its answer was whole."""

    def __init__(self) -> None:
        self.tokens = 0
        """Since the engine's start."""
        self._lengths: tuple[int, ...] = ()

    def ended(self, length: int) -> None:
        """A completion has ended with these tokens, and nobody has it."""
        if length:
            self._lengths = added(self._lengths, histogram([length]))

    def take_lengths(self) -> tuple[int, ...]:
        """Lengths of the completions that have ended so since the last call (`streamrl.core.lengths`)."""
        lengths, self._lengths = self._lengths, ()
        return lengths
