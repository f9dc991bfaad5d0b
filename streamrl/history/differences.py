"""Where two configurations differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.tree import Config, schedule_steps
from streamrl.runtime.run_record import DECAY_STEPS, flat_keys

_OWN_KEYS = {"run.name", "run.dir", "trainer.name"}


class Difference(msgspec.Struct, frozen=True):
    """A key of the configuration whose value is not the same."""

    key: str
    a: Any
    b: Any


def config_differences(a: Config, b: Config) -> tuple[Difference, ...]:
    """Where two configurations differ, by key. The run's or tap's own name and place do not count, nor do the folders of files.

    The length of the learning rate's schedule is what it comes to, whether it is said or not.
    """
    first, second = (flat_keys(msgspec.to_builtins(one)) | {DECAY_STEPS: schedule_steps(one)} for one in (a, b))
    keys = sorted((first.keys() | second.keys()) - _OWN_KEYS)
    return tuple(Difference(key, first.get(key), second.get(key)) for key in keys if _what(first.get(key)) != _what(second.get(key)))


def _what(value: Any) -> Any:
    """The value; of a path only its last part: a recording lies elsewhere than its run."""
    return Path(value).name if isinstance(value, str) and value.startswith("/") else value
