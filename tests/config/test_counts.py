"""Whole numbers that are too large are refused by their key, before anything is started."""

import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from streamrl.config.check import check
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.core.fold_config import fold_config
from streamrl.core.state import initial_state
from streamrl.doctor.run_checks import check_budgets
from streamrl.errors import ConfigError
from streamrl.schemas.codec import encode
from tests.support.refusals import refused


def counts(section: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    """Keys of whole numbers, those of sections within sections too."""
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            yield from counts(value, f"{prefix}{field.encode_name}.")
        elif type(value) is int:
            yield prefix + field.encode_name


KEYS = sorted(set(counts(Config())) - {"run.seed"})


@pytest.fixture
def file(write) -> Path:
    return write("[engine]\nkind = 'table'\n[trainer]\nbackend = 'table'\n")


def test_each_of_them_is_refused(file: Path) -> None:
    for key in KEYS:
        for value in (2**63 - 1, 2**63, 10**30):
            with refused(ConfigError, key):
                load(file, [f"{key}={value}"])
    with pytest.raises(ConfigError, match="seed"):
        load(file, ["run.seed=9223372036854775808"])
    assert load(file, ["run.seed=9223372036854775807"]).run.seed == 2**63 - 1


def test_the_largest_that_are_taken_have_room_wherever_they_go(file: Path) -> None:
    most = 2**31 - 1
    keys = ("tasks.batch_tasks", "tasks.max_staleness", "run.steps", "warmup.max_steps")
    config = load(file, [f"{key}={most}" for key in keys])
    state = initial_state(fold_config(config))
    assert msgspec.msgpack.decode(encode(state.grant)) and state.granted == 2**31 * most
    check(config)
    budgets = load(file, [f"bus.{name}={2**53}" for name in ("samples_bytes", "blobs_bytes", "sample_blobs_bytes")])
    assert check_budgets(budgets).state == "warn" and math.isfinite(budgets.bus.samples_bytes)
