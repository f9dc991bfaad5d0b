"""The section `slo`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from streamrl.config.bounds import Fraction, NonNegativeFloat, Section


class SloConfig(Section, frozen=True, kw_only=True):
    """What a run is held to (docs/slo.md). 0 turns a bound off; what is not known is not judged."""

    p95_age: NonNegativeFloat = 0.0
    """Versions: 95th percentile of the ages of the newest batch's trained tokens."""
    stream_lag_s: NonNegativeFloat = 600.0
    """Seconds: age of the oldest message that no batch has come to."""
    versions_behind: NonNegativeFloat = 0.0
    """Versions that the worst engine is behind the newest one."""
    starvation: Fraction = 0.0
    """Part of its time in which the trainer waits for samples. Where sampling is what takes long, much of it is no fault."""
    drop_rate: Fraction = 0.9
    """Rollouts dropped, of those that were trained or dropped within a window."""
    no_progress_s: NonNegativeFloat = 1800.0
    """Seconds since the newest batch."""
    logprob_float32: NonNegativeFloat = 1e-4
    """Nats: mean distance of an engine's log-probs from the trainer's under the same weights, in a run whose weights are float32."""
    logprob_bfloat16: NonNegativeFloat = 0.1
    """The same in bfloat16, whatever the engine's first batches were."""
    logprob_growth: NonNegativeFloat = 3.0
    """In bfloat16: that distance over the median of the engine's first 5 batches that have one."""
    warn: Fraction = 0.75
    """So much of a bound is a warning."""
    hold_s: NonNegativeFloat = 30.0
    """A level counts once it has held for so long, above its bound, or below nine tenths of it."""
    webhook: str = ""
    """URL that is sent every change as JSON; empty: none."""
    webhook_timeout_s: Annotated[float, Meta(gt=0, le=60)] = 5.0
    """Longest that it may take to answer."""
