"""Learning-rate schedules: pure functions of the step, so that a restart needs no state for them.

Steps 0 .. warmup_steps - 1 rise to the peak in equal parts (the first is peak / warmup_steps, not 0: a step that changes nothing would be
wasted). With `end` = total_steps - 1, from there on, as a fraction of the peak that `final_fraction` bounds from below:

```text
constant      1
linear        falls in equal parts to final_fraction at `end`
cosine        falls along half a cosine to final_fraction at `end`                                  (arXiv 1608.03983, without restarts)
wsd           1, then over the last cooldown_fraction of total_steps in equal parts to final_fraction at `end`      (arXiv 2404.06395)
inverse_sqrt  sqrt(warmup_steps / step), which has no end                                                           (arXiv 1706.03762)
```
"""

from __future__ import annotations

import math
from typing import Literal

ScheduleKind = Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"]


def learning_rate(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    final_fraction: float,
    kind: ScheduleKind = "linear",
    cooldown_fraction: float = 0.2,
) -> float:
    """The rate of one step.

    Args:
        step: optimizer schedule position, from 0.
        peak: highest rate.
        warmup_steps: steps of the rise; 0: none.
        total_steps: length of the schedule, rise included; from its last step on the rate stays. Not of `constant` and `inverse_sqrt`.
        final_fraction: what is left of the peak at the end; not of `constant`.
        kind: the schedule.
        cooldown_fraction: of `wsd`, the part of total_steps that the fall takes, to whole steps.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    if kind == "inverse_sqrt":
        return peak * max(final_fraction, math.sqrt(warmup_steps / step) if step else 1.0)
    begin = warmup_steps
    if kind == "wsd":
        begin = max(begin, total_steps - 1 - round(cooldown_fraction * total_steps))
    done = min(max(step - begin, 0) / max(total_steps - 1 - begin, 1), 1.0)
    if kind == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2
    return peak * (1.0 - (1.0 - final_fraction) * done)
