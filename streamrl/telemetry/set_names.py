"""Metrics of sets of problems: their names hold the set's, so they are declared by their form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from streamrl.telemetry.metric import Metric, Reduction

_PART = {
    "": ("reward", "mean reward of the answers of the set `{set}`, over its problems, by version"),
    "-ci_low": ("reward", "lower end of the 95 % bootstrap interval of that mean"),
    "-ci_high": ("reward", "upper end of that interval"),
    "-pass@{k}": ("fraction", "pass@{k}: problems of which one of {k} samples is right, estimated without bias"),
    "-maj@{k}": ("reward", "maj@{k}: reward of the answer that most of {k} samples give"),
    "-truncated_ratio": ("fraction", "answers that a length limit truncated"),
    "-failed_ratio": ("fraction", "samples that have failed and have no reward; they are in no other of these numbers"),
    "-response_len": ("tokens", "mean length of the samples"),
    "-took_s": ("s", "time that asking took"),
}
_WHEN = "there are problems: `data.heldout`, `[[evaluation.sets]]`"
_SEVERAL = "and `n` is above 1"
SET_METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        name: Metric(name, Reduction.MEAN, unit, meaning, when=_WHEN + (f" {_SEVERAL}" if "maj" in part else ""))
        for part, (unit, meaning) in _PART.items()
        for name in [f"eval/{{set}}{part}"]
    }
)
"""By form, in which `{set}` and `{k}` stand for a name and a number."""
_FORM = re.compile(
    r"eval/(?P<set>[A-Za-z0-9_-]{1,64}?)(?P<part>|-(?:pass|maj)@(?P<k>\d{1,6})|-ci_low|-ci_high|-truncated_ratio|-failed_ratio|-response_len|-took_s)"
)


def set_metric(name: str) -> Metric | None:
    """The declaration of a set's metric, or None where the name has not the form of one."""
    found = _FORM.fullmatch(name)
    if found is None:
        return None
    part = re.sub(r"\d+$", "{k}", found["part"]) if found["k"] else found["part"]
    unit, meaning = _PART[part]
    return Metric(name, Reduction.MEAN, unit, meaning.format(set=found["set"], k=found["k"]), when=_WHEN)
