"""Answer lengths side by side, as the page draws them: of what was finished, cut, trained and dropped."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from streamrl.monitor.lengths import distance_text, known, quantiles, side_by_side
from streamrl.monitor.run_state import RunState
from streamrl.telemetry.names import LENGTHS, length_quantile

MOST_BARS = 32


def lengths_of(state: RunState | None) -> dict[str, Any]:
    """Histograms between the same bounds, and what their distance says.

    Returns:
        `bounds` the first and the last length of each bar, None as the last of the last bar, for nobody tells the longest; `lines` the
        name, the share of each bar, the number of answers, median and 95th percentile of each kind; `said` the distance in words. No
        line: nothing is known.
    """
    counts = known(state.lengths) if state is not None else {}
    if state is None or not any(map(any, counts.values())):
        return {"bounds": [], "lines": [], "said": ""}
    least, bars = side_by_side(counts, MOST_BARS)
    # Between 1 and 2 there are bounds without a whole number between them.
    places = [place for place, (first, beyond) in enumerate(pairwise(least)) if beyond > first]
    middle = quantiles(counts)
    lines: list[dict[str, Any]] = []
    for name in LENGTHS:
        of = bars.get(name, [0] * (len(least) - 1))
        total = sum(of)
        line = {"name": name.partition("/")[2], "number": total, "shares": [of[place] / total if total else 0.0 for place in places]}
        lines.append(line | {word: middle.get(length_quantile(name, word)) for word in ("p50", "p95")})
    return {
        "bounds": [(least[place], least[place + 1] - 1 if place < places[-1] else None) for place in places],
        "lines": lines,
        "said": distance_text(state.length_distance, cut=state.length_cut),
    }
