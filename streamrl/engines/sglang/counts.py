"""What an SGLang engine has done so far."""

from __future__ import annotations

from streamrl.engines.extras import INEXACT
from streamrl.engines.protocol import Chunk
from streamrl.telemetry.clock import StateClock

_METRICS = {
    "cached_tokens": "engine/cached_tokens_total",
    "num_retractions": "engine/retractions_total",
    "spec_verify_ct": "engine/verify_passes_total",
    "spec_num_proposed_drafts": "engine/drafted_tokens_total",
    "spec_num_correct_drafts": "engine/accepted_drafts_total",
}


class Counts:
    """Counters since the engine's start, and its load now.

    Args:
        slots: completions that the server decodes at once.
    """

    def __init__(self, slots: int) -> None:
        self.clock = StateClock("setup")
        """Where the server's time goes, as far as its requests say it: prefill is part of `decode`."""
        self._slots = slots
        self._full_clock = StateClock("free")
        self.tokens = 0
        """Tokens sampled."""
        self.swaps = 0
        self.last_swap_ms = 0.0
        self.waiting = 0
        """Completions whose turn has not come."""
        self.sent = 0
        """Completions at the server, with those that nobody waits for and that it has not dropped yet."""
        self.totals: dict[str, float] = {}
        """By metric name."""

    def moved(self) -> None:
        """`swaps`, `waiting` or `sent` has changed."""
        self.clock.enter("decode" if self.sent else "setup" if not self.swaps else "held" if self.waiting else "idle")
        self._full_clock.enter("saturated" if self.sent > self._slots else "free")

    def tick(self) -> None:
        """Count the time that all slots were busy while requests waited."""
        self._add("engine/saturated_s", self._full_clock.take().get("saturated", 0.0))

    def add(self, chunk: Chunk, prompt_tokens: int) -> None:
        """Count a chunk; the last one of a completion also says how it went."""
        self.tokens += len(chunk.token_ids)
        if chunk.finish_reason is None:
            return
        self._add("engine/prompt_tokens_total", prompt_tokens)
        for name, metric in _METRICS.items():
            self._add(metric, chunk.extras.get(name, 0))
        if chunk.extras.get(INEXACT):
            self._add("engine/inexact_completions_total", 1)

    def _add(self, metric: str, amount: float) -> None:
        if amount:
            self.totals[metric] = self.totals.get(metric, 0.0) + amount
