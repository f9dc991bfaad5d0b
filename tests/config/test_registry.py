"""The table of names, and the code of the rooms above: what stands in one stands in the other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from torch import Tensor

from streamrl.algorithms import choices, estimators, policy
from streamrl.algorithms.sequences import Sequences
from streamrl.config.check_files import field
from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.loss import LossConfig
from streamrl.config.registry import ENGINES, ESTIMATORS, FORMER_ADVANTAGES, POLICY_LOSSES, EngineName
from streamrl.config.tree import Config
from streamrl.engines import factory
from streamrl.trainers.table import losses as table_losses

ROOT = Path(__file__).parents[2]


def test_every_name_has_its_code_and_settings_in_the_section() -> None:
    assert set(estimators.ESTIMATORS) == set(ESTIMATORS)
    assert set(policy.POLICY_LOSSES) == set(POLICY_LOSSES)
    assert set(table_losses.POLICY_LOSSES) == {name for name, known in POLICY_LOSSES.items() if known.table}
    assert set(factory.FACTORIES) == set(ENGINES) == set(get_args(EngineName))
    assert len({*estimators.ESTIMATORS.values()}) == len(ESTIMATORS)
    assert len({*policy.POLICY_LOSSES.values()}) == len(POLICY_LOSSES)
    assert set(choices.CHOICES) == {name for name, known in POLICY_LOSSES.items() if known.choice is not None}
    for name, chooser in choices.CHOICES.items():
        parameters = inspect.signature(chooser).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} == set(POLICY_LOSSES[name].choice or {})
    for known in ESTIMATORS.values():
        for key in known.settings:
            field(Config(), f"loss.{key}")
    for known in POLICY_LOSSES.values():
        assert known.keys <= set(LossConfig.__struct_fields__)
    assert set(FORMER_ADVANTAGES) <= set(POLICY_LOSSES)
    assert set(FORMER_ADVANTAGES.values()) <= set(ESTIMATORS)
    for name, kind in ENGINES.items():
        assert (name in EngineConfig.__struct_fields__) == kind.server
        assert EngineConfig(kind=name).traits == kind
    swaps = next(setting.type for setting in msgspec.structs.fields(SglangConfig) if setting.name == "swap")
    assert get_args(swaps) == ("auto", *ENGINES["sglang"].swaps)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_policy_loss_takes_what_the_table_says(name: str) -> None:
    parameters = inspect.signature(policy.POLICY_LOSSES[name], eval_str=True).parameters
    given = [p for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert {p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY} == set(POLICY_LOSSES[name].settings)
    known = POLICY_LOSSES[name]
    assert [p.annotation for p in given[3:]] == [Sequences] * known.sequences + [Tensor] * (known.choice is not None) + [
        Tensor | None
    ] * known.likeliest
    assert given[1].name.startswith("sampler") == (POLICY_LOSSES[name].anchor == "sampler")


def test_nobody_asks_for_a_kind_of_engine_by_name() -> None:
    asked = re.compile(r"engine\.kind\s*(==|!=|in\b|not in\b)")
    modules = [path for room in ("streamrl", "producers", "consumers") for path in (ROOT / room).rglob("*.py") if "bench" not in path.parts]
    assert len(modules) > 200
    assert [str(path) for path in modules if asked.search(path.read_text())] == []
