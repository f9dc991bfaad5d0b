"""A benchmark refuses what it cannot measure before it starts anything."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from benchmarks.bus.plan import BusOptions
from benchmarks.engine.spec import Spec
from benchmarks.evaluation.spec import EvaluationSpec
from benchmarks.gateway.spec import GatewaySpec
from benchmarks.hung.spec import HungSpec
from benchmarks.loop.ways import LoopSpec
from benchmarks.rewards.spec import RewardsSpec
from streamrl.errors import ConfigError

WRONG: dict[type[msgspec.Struct], list[dict[str, Any]]] = {
    BusOptions: [
        *({"rounds": 0}, {"samples": ()}, {"tokens": (0,)}, {"tokens": (1 << 20,)}, {"max_tasks": 2}, {"round_tokens": 10**9}),
        {"samples": (1024,)},
    ],
    Spec: [{"models": ("huge",)}, {"batches": (0,)}, {"batches": ()}, {"rounds": 0}],
    EvaluationSpec: [{"engine": "sglang"}, {"engine": "vllm"}, {"model": "m"}, {"n": 0}, {"token_ms": -1.0}],
    GatewaySpec: [{"rounds": 0}, {"rate": 0.0}, {"sessions": 0}],
    HungSpec: [{"skip": 40}, {"rounds": 0}, {"hung": 1.0}],
    LoopSpec: [{"batches": 5, "skip": 5}, {"tail_skip": 0}, {"rounds": 0}],
    RewardsSpec: [{"skip": 120}, {"rounds": 0}, {"hung": 1.0}, {"graders": 13}],
}


@pytest.mark.parametrize(("spec", "wrong"), [(spec, wrong) for spec, cases in WRONG.items() for wrong in cases])
def test_what_cannot_be_measured_is_refused(spec: type[msgspec.Struct], wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        spec(**wrong)
