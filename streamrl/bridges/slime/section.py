"""Puts the hooks that the section `slime` names at streamrl's own keys (docs/slime-hooks.md).

```text
[slime] custom_rm_path = "my.py:rm"   ->   reward.kind = "slime:my.py:rm"   ->   streamrl.bridges.slime.hooks makes a reward of it
```
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from streamrl.bridges.slime.known import REFUSED
from streamrl.config.bounds import refuse
from streamrl.config.loss import estimator_of
from streamrl.config.slime import SlimeConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError

SLIME = "slime:"
"""Prefix of a function with slime's signature at a key of streamrl's own: `slime:file.py:name`. The next three are used likewise."""
GROUP = "slime_group:"
"""A reward that is called with all samples of a group."""
ROLLOUT = "slime_rollout:"
"""A rollout function, in place of a producer."""
REWARDS = "slime_rewards:"
"""A function that processes the rewards of a batch, in place of advantages."""
OPTION = "slime_args"
"""The option under which code that runs in children is given what slime calls `args`."""
DEFAULT_GENERATE = f"{SLIME}streamrl.bridges.slime.generate:generate"
KEEP_ALL = f"{SLIME}streamrl.bridges.slime.scoring:keep_all"
"""The value of a key that names nothing itself, but has hooks that run beside it."""


class Place(msgspec.Struct, frozen=True):
    """The key of streamrl's own that takes the function of one of slime's."""

    flag: str
    section: str
    key: str
    prefix: str
    built_in: tuple[str, ...]
    """Values of the key that count as nothing chosen."""


PLACES = (
    Place("custom_generate_function_path", "producer", "function", SLIME, ("single_turn",)),
    Place("rollout_function_path", "producer", "function", ROLLOUT, ("single_turn",)),
    Place("custom_rm_path", "reward", "kind", SLIME, ("exact_match",)),
    Place("dynamic_sampling_filter_path", "filters", "function", SLIME, ("",)),
    Place("custom_reward_post_process_path", "loss", "advantage", REWARDS, ("grpo",)),
    Place("custom_advantage_function_path", "loss", "advantage", SLIME, ("grpo",)),
    Place("custom_tis_function_path", "loss", "policy", SLIME, ("", "ppo")),
    Place("custom_loss_function_path", "loss", "slime_loss", "", ("",)),
)


BESIDE_FILTER = ("rollout_sample_filter_path", "rollout_all_samples_process_path")
"""Functions that are called beside the filter."""


def refuse_hooks(tree: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a hook of slime's in a raw table that has no place here, with the reason and what is nearest."""
    section = tree.get("slime")
    for key in section if isinstance(section, Mapping) else ():
        name = str(key).removeprefix("--").replace("-", "_")
        if name in REFUSED:
            reason, nearest = REFUSED[name]
            raise ConfigError(f"slime.{key} has no place here, in {where}: {reason}", hint=nearest, key=f"slime.{key}")
        if name != key and name in SlimeConfig.__struct_fields__:
            raise ConfigError(f"expected slime.{name}, got slime.{key}, in {where}", hint="write it with underscores", key=f"slime.{key}")


def lowered(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Put the functions that the section `slime` of a raw table names at streamrl's own keys, too. A second time it changes nothing.

    Raises:
        ConfigError: such a key names something else already, or two functions are for one key.
    """
    refuse_hooks(tree, where)
    given = tree.get("slime")
    if not isinstance(given, Mapping) or not given:
        return dict(tree)
    found = dict(tree)
    taken: dict[str, str] = {}
    for place in PLACES:
        reference = given.get(place.flag)
        if not isinstance(reference, str) or not reference:
            continue
        name = f"{place.section}.{place.key}"
        if name in taken:
            raise ConfigError(
                f"slime.{place.flag} and slime.{taken[name]} are both for {name}, in {where}",
                hint="one function has to do the work of both",
                key=f"slime.{place.flag}",
            )
        taken[name] = place.flag
        prefix = GROUP if place.flag == "custom_rm_path" and given.get("group_rm") else place.prefix
        _put(found, place, prefix + reference, where)
    _and_more(found, given, taken, where)
    return found


def _put(tree: dict[str, Any], place: Place, value: str, where: str) -> None:
    section = tree.get(place.section, {})
    if not isinstance(section, Mapping):
        return  # reading the whole configuration reports the wrong type
    now = section.get(place.key, place.built_in[0])
    if now not in (*place.built_in, value):
        raise ConfigError(
            f"slime.{place.flag} takes the place of {place.section}.{place.key}, which is {now!r}, in {where}",
            hint="leave one of the two out",
            key=f"slime.{place.flag}",
        )
    tree[place.section] = {**section, place.key: value}


def _and_more(tree: dict[str, Any], given: Mapping[str, Any], taken: Mapping[str, str], where: str) -> None:
    """Check what hooks need besides the key that names them, and set it in `tree`."""
    if given.get("group_rm") and not given.get("custom_rm_path"):
        raise ConfigError(
            f"slime.group_rm is for slime.custom_rm_path, which names nothing, in {where}", hint="name it", key="slime.group_rm"
        )
    if given.get("rollout_sample_hook_path"):
        if taken.get("producer.function") == "rollout_function_path":
            raise ConfigError(
                f"slime.rollout_sample_hook_path with slime.rollout_function_path, which makes and scores whole groups, in {where}",
                hint="call the hook there",
                key="slime.rollout_sample_hook_path",
            )
        if "producer.function" not in taken:
            _put(tree, Place("rollout_sample_hook_path", "producer", "function", "", ("single_turn",)), DEFAULT_GENERATE, where)
    if (marks := next(filter(given.get, BESIDE_FILTER), "")) and "filters.function" not in taken:
        _put(tree, Place(marks, "filters", "function", "", ("",)), KEEP_ALL, where)
    loss = tree.get("loss", {})
    if "loss.policy" in taken and isinstance(loss, Mapping):
        correction = loss.get("correction", {})
        if isinstance(correction, Mapping) and correction.get("kind", "none") == "none":
            # The function's weights stand for these.
            tree["loss"] = {**loss, "correction": {**correction, "kind": "none"}}
        else:
            raise ConfigError(
                f"slime.custom_tis_function_path takes the place of loss.correction, which is set too, in {where}",
                hint='leave loss.correction.kind out, or set it to "none"',
                key="slime.custom_tis_function_path",
            )


def raised(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Remove from a table what `lowered` has put there, so that its section `slime` can be changed."""
    given = tree.get("slime", {})
    found = {name: dict(section) if isinstance(section, Mapping) else section for name, section in tree.items()}
    for place in PLACES:
        if given.get(place.flag):
            found[place.section].pop(place.key, None)
    for section, value in (("producer", DEFAULT_GENERATE), ("filters", KEEP_ALL)):
        if found[section].get("function") == value:
            found[section].pop("function")
    if given.get("custom_tis_function_path"):
        found["loss"]["correction"] = {name: value for name, value in found["loss"]["correction"].items() if name != "kind"}
    return found


def unknown_flag(name: str, known: Mapping[str, Any]) -> str:
    """Return the message for a value of `args` that is missing."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}?" if near else "values of your own go into [slime] custom_config, which hooks of the trainer do not see"
    return f"slime's args has no {name!r} here; {hint} (docs/slime-hooks.md lists what it has)"


def check_config(config: Config) -> None:
    """Raise ConfigError for what does not go with a rollout function."""
    refuse(
        estimator_of(config.loss).greedy and config.producer.function.startswith(ROLLOUT),
        f"loss.advantage = {config.loss.advantage} needs a greedy rollout of each task, but slime.rollout_function_path rolls whole groups "
        "out, and its requests do not say for which rollout they are",
        hint="use slime.custom_generate_function_path, which is called for each rollout",
        key="loss.advantage",
    )
