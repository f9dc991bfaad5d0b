"""Options of user code that look like secrets: they are kept beside the configuration, not in it.

The configuration is stored with the run, on the bus and in every recording, where others read it. What goes by a name such as `api_key`
or `password` lies in a file of the run's `credentials/` instead, and its workers get it back.
"""

from __future__ import annotations

import re

from msgspec.structs import replace

from streamrl.config.tree import Config

SecretOptions = dict[str, dict[str, str]]
"""By section (`producer`, `reward`, `filters`) and option."""

_SECRET = re.compile(r"(?:^|_)(?:api_?key|access_?key|private_?key|secret(?:_?key)?|password|passwd|passphrase|token|credentials?)$")


def without_secrets(config: Config) -> tuple[Config, SecretOptions]:
    """The configuration as it may be read by others, and what was taken out: texts whose name sounds like a secret's."""
    taken: SecretOptions = {}
    sections = {"producer": config.producer.options, "reward": config.reward.options, "filters": config.filters.options}
    for section, options in sections.items():
        found = {name: value for name, value in options.items() if _is_secret(name, value)}
        if found:
            taken[section] = found
    return _replaced(config, {s: {n: v for n, v in getattr(config, s).options.items() if n not in taken[s]} for s in taken}), taken


def with_secrets(config: Config, secrets: SecretOptions) -> Config:
    """What `without_secrets` was given."""
    return _replaced(config, {section: {**getattr(config, section).options, **found} for section, found in secrets.items()})


def _replaced(config: Config, options: dict[str, dict[str, object]]) -> Config:
    return replace(config, **{section: replace(getattr(config, section), options=found) for section, found in options.items()})


def _is_secret(name: str, value: object) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET.search(name.lower().replace("-", "_")) is not None
