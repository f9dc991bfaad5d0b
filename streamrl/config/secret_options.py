"""Options of user code that look like secrets: they are kept beside the configuration, not in it.

The configuration is stored with the run, on the bus and in every recording, where others read it. What goes by a name such as `api_key`
or `password` lies in a file of the run's `credentials/` instead, and its workers get it back.
"""

from __future__ import annotations

import re
from typing import Any

from msgspec.structs import replace

from streamrl.config.bridges import sections
from streamrl.config.tree import Config

SecretOptions = dict[str, dict[str, str]]
"""By section and option: `producer`, `reward`, `filters`, those of bridges, and of a set of problems `evaluation.sets[name]` and
`evaluation.sets[name].reward`."""

_SECRET = re.compile(r"(?:^|_)(?:api_?key|access_?key|private_?key|secret(?:_?key)?|password|passwd|passphrase|token|credentials?)$")


def without_secrets(config: Config) -> tuple[Config, SecretOptions]:
    """The configuration as it may be read by others, and what was taken out: texts whose name sounds like a secret's."""
    taken: SecretOptions = {}
    for section, options in _sections(config).items():
        found = {name: value for name, value in options.items() if _is_secret(name, value)}
        if found:
            taken[section] = found
    left = {s: {n: v for n, v in options.items() if n not in taken.get(s, {})} for s, options in _sections(config).items()}
    return _replaced(config, left), taken


def with_secrets(config: Config, secrets: SecretOptions) -> Config:
    """What `without_secrets` was given."""
    return _replaced(config, {section: {**options, **secrets.get(section, {})} for section, options in _sections(config).items()})


def _sections(config: Config) -> dict[str, dict[str, Any]]:
    """All options of user code."""
    found = {"producer": config.producer.options, "reward": config.reward.options, "filters": config.filters.options}
    found |= {section: getattr(config, section).custom_config for section in sections()}
    for one in config.evaluation.sets:
        found |= {f"evaluation.sets[{one.name}]": one.options, f"evaluation.sets[{one.name}].reward": one.reward.options}
    return found


def _replaced(config: Config, options: dict[str, dict[str, Any]]) -> Config:
    sets = tuple(
        replace(
            one,
            options=options[f"evaluation.sets[{one.name}]"],
            reward=replace(one.reward, options=options[f"evaluation.sets[{one.name}].reward"]),
        )
        for one in config.evaluation.sets
    )
    return replace(
        config,
        producer=replace(config.producer, options=options["producer"]),
        reward=replace(config.reward, options=options["reward"]),
        filters=replace(config.filters, options=options["filters"]),
        **{section: replace(getattr(config, section), custom_config=options[section]) for section in sections()},
        evaluation=replace(config.evaluation, sets=sets),
    )


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET.search(name.lower().replace("-", "_")) is not None
