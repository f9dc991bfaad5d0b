"""Words that earlier versions wrote, in files and in the records of runs: read as what they mean now, so that old runs load and resume.

Only what still has one clear meaning is read so; `streamrl.config.load` names the successors of other keys in its hints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamrl.config.registry import FORMER_ADVANTAGES
from streamrl.errors import ConfigError

RENAMED_KEYS = {"tasks.drop_zero_spread": "tasks.drop_zero_variance"}
"""Keys that have another name now."""
CHECKPOINTING: str = "trainer.gradient_checkpointing"
ACTIVATIONS: str = "trainer.activations"
FORMER_KEYS = (
    RENAMED_KEYS
    | {CHECKPOINTING: ACTIVATIONS}
    | {f"loss.correction.reject_{name}": "loss.correction.reject" for name in ("level", "low", "high")}
)
"""Those, and keys that are parts of another key now."""
LATER_DECISIONS = {"tasks.inexact": "allow", "tasks.check_max_len": False, "filters.min_reward_std": 0.0, "data.reading": "whole"}
"""What a recorded configuration means by lacking a key that has another default: a decision that there was not yet is off. `dump` leaves
it out too, so that a run that was begun without it stays so."""
_REJECT = "loss.correction.reject"


def in_present_words(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A table of the whole configuration in the words of this version; what needs no translation stays as it is, wrong or not.

    `loss.advantage = "gspo"` (or `cispo`) is `grpo` with that policy loss. `loss.correction.reject = "k3"` with `reject_level`,
    `reject_low` and `reject_high` is a list of one criterion, and `"none"` an empty one; where there is one criterion already, the three
    keys change it. `trainer.gradient_checkpointing = true` is `trainer.activations = 0`, and false `"all"`.

    Raises:
        ConfigError: the old words contradict the new ones beside them.
    """
    tree = _activations(_renamed(tree))
    loss = tree.get("loss")
    if not isinstance(loss, Mapping):
        return tree
    loss = _advantage(loss)
    if isinstance(correction := loss.get("correction"), Mapping):
        loss["correction"] = _rejection(correction)
    return {**tree, "loss": loss}


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


def _renamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    present = dict(tree)
    for old, new in RENAMED_KEYS.items():
        (section, former), (_, key) = old.split("."), new.split(".")
        values = present.get(section)
        if not isinstance(values, Mapping) or former not in values:
            continue
        if key in values:
            raise ConfigError(f"expected {new} alone, got {old} too, which is its former name", hint=f"remove {old}", key=old)
        present[section] = {key if name == former else name: value for name, value in values.items()}
    return present


def kept_layers(checkpointing: Any) -> Any:
    """`trainer.activations` for a value of `trainer.gradient_checkpointing`; one that was never right stays as it is."""
    return (0 if checkpointing else "all") if isinstance(checkpointing, bool) else checkpointing


def _activations(tree: dict[str, Any]) -> dict[str, Any]:
    trainer = tree.get("trainer")
    former, key = CHECKPOINTING.partition(".")[2], ACTIVATIONS.partition(".")[2]
    if not isinstance(trainer, Mapping) or former not in trainer:
        return tree
    if key in trainer:
        raise ConfigError(
            f"expected {ACTIVATIONS} alone, got {CHECKPOINTING} too, which it has replaced",
            hint=f"remove {CHECKPOINTING}",
            key=CHECKPOINTING,
        )
    rest = {name: value for name, value in trainer.items() if name != former}
    return {**tree, "trainer": {**rest, key: kept_layers(trainer[former])}}


def _advantage(loss: Mapping[str, Any]) -> dict[str, Any]:
    name, policy = loss.get("advantage"), loss.get("policy")
    if not isinstance(name, str) or name not in FORMER_ADVANTAGES:
        return dict(loss)
    if policy not in (None, "", name):
        raise ConfigError(
            f"loss.advantage = {name} is {FORMER_ADVANTAGES[name]} with the policy loss {name}, but loss.policy is {policy}",
            hint=f"set loss.advantage = '{FORMER_ADVANTAGES[name]}' for {policy} on the same advantages",
            key="loss.policy",
        )
    return {**loss, "advantage": FORMER_ADVANTAGES[name], "policy": name}


def _rejection(correction: Mapping[str, Any]) -> dict[str, Any]:
    bounds = {name: correction[f"reject_{name}"] for name in ("level", "low", "high") if f"reject_{name}" in correction}
    rest = {key: value for key, value in correction.items() if f"loss.correction.{key}" not in FORMER_KEYS}
    criteria = rest.get("reject", "none")
    if isinstance(criteria, str) and criteria != "none":
        return {**rest, "reject": [{"measure": criteria, **bounds}]}
    if criteria in ("none", [], ()):
        if bounds.get("low", 0) != 0 or bounds.get("high", 0) != 0:
            raise ConfigError(
                f"{_REJECT}_low and reject_high are {bounds.get('low', 0)} and {bounds.get('high', 0)}, but {_REJECT} is none",
                hint=f"set {_REJECT} = 'ratio', 'k1', 'k2' or 'k3'",
                key=_REJECT,
            )
        return {**rest, "reject": []} if "reject" in rest else rest
    if not bounds:
        return rest
    if not (isinstance(criteria, list | tuple) and len(criteria) == 1 and isinstance(criteria[0], Mapping)):
        raise ConfigError(
            f"{_REJECT}_{next(iter(bounds))} is of a single criterion, but {_REJECT} has {len(criteria)}",
            hint=f"write each criterion's bounds in its own table [[{_REJECT}]]",
            key=_REJECT,
        )
    return {**rest, "reject": [{**criteria[0], **bounds}]}
