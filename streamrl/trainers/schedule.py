"""Learning-rate schedule: a pure function of the step, so that a restart needs no state for it."""

from __future__ import annotations


def learning_rate(step: int, *, peak: float, warmup_steps: int, total_steps: int, final_fraction: float) -> float:
    """Linear rise, then linear fall.

    Steps 0 .. warmup_steps - 1 rise to the peak in equal parts (the first is peak / warmup_steps, not 0: a step that
    changes nothing would be wasted). From there the rate falls linearly to final_fraction * peak at the last step,
    total_steps - 1, and stays there.

    Args:
        step: optimizer schedule position, from 0.
        peak: highest rate.
        warmup_steps: steps of the rise; 0: none.
        total_steps: length of the schedule, rise included.
        final_fraction: what is left of the peak at the end.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    fall = max(total_steps - 1 - warmup_steps, 1)
    done = min((step - warmup_steps) / fall, 1.0)
    return peak * (1.0 - (1.0 - final_fraction) * done)
