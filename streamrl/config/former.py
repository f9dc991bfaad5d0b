"""Translates the configurations of tests/recorded, which earlier versions wrote in other words, so that those runs load and resume."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LATER_DECISIONS = {"tasks.inexact": "allow", "tasks.check_max_len": False, "filters.min_reward_std": 0.0, "data.reading": "whole"}
"""What a recorded configuration means by lacking a key that has another default: a decision that there was not yet is off. `dump` leaves
it out too, so that a run that was begun without it stays so."""
_NO_REJECTION = {"reject": "none", "reject_level": "token", "reject_low": 0.0, "reject_high": 0.0}


def in_present_words(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of the whole configuration in the words of this version; what needs no translation stays as it is, wrong or not.

    `tasks.drop_zero_spread` is `tasks.drop_zero_variance`, `trainer.gradient_checkpointing = false` is `trainer.activations = "all"`, and
    a `loss.correction` that rejects nothing has an empty list.
    """
    present = {section: dict(values) if isinstance(values, Mapping) else values for section, values in tree.items()}
    tasks, trainer, loss = (present[name] if isinstance(present.get(name), dict) else {} for name in ("tasks", "trainer", "loss"))
    if "drop_zero_spread" in tasks and "drop_zero_variance" not in tasks:
        tasks["drop_zero_variance"] = tasks.pop("drop_zero_spread")
    if trainer.get("gradient_checkpointing") is False and "activations" not in trainer:
        trainer["activations"] = "all"
        del trainer["gradient_checkpointing"]
    correction = loss.get("correction")
    if isinstance(correction, Mapping) and all(key in correction and correction[key] == value for key, value in _NO_REJECTION.items()):
        loss["correction"] = {key: value for key, value in correction.items() if key not in _NO_REJECTION} | {"reject": []}
    return present


def as_recorded(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A whole recorded configuration, every key of its time among it, with `LATER_DECISIONS` where it lacks them."""
    whole = dict(tree)
    for key, value in LATER_DECISIONS.items():
        section, name = key.split(".")
        values = whole.get(section, {})
        if isinstance(values, Mapping):
            whole[section] = {name: value, **values}
    return whole


def for_the_record(tree: dict[str, Any]) -> dict[str, Any]:
    """The other way round: a whole configuration without the `LATER_DECISIONS` that are off."""
    for key, value in LATER_DECISIONS.items():
        section, name = key.split(".")
        if tree[section][name] == value:
            del tree[section][name]
    return tree
