"""The distance between each engine's log-probs and the trainer's, from the ledger's metrics to a finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.slo import SloConfig
from streamrl.monitor.distances import FIRST, Distance, Distances
from streamrl.monitor.numbers import Level, RunNumbers
from streamrl.monitor.slo import Judge, Signs, line_of
from streamrl.monitor.view import RunView
from streamrl.telemetry.names import BY_ENGINE, MOST_ENGINES, declared, metric, of_engine

NOTHING: RunNumbers = RunView("demo").numbers(elapsed_s=1.0)
(NAME,) = BY_ENGINE


def told(batches: Sequence[dict[str, float]]) -> dict[str, Distance]:
    """The distances that batches with these come to."""
    distances = Distances()
    for batch in batches:
        distances.take({"train/loss": 1.0, NAME: 9.0, **{of_engine(NAME, engine): value for engine, value in batch.items()}})
    return distances.of_engines()


def found(batches: Sequence[dict[str, float]], *, float32: bool, **bounds: Any) -> dict[str, Level]:
    """Findings at once, by objective."""
    signs = Signs(numbers=NOTHING, distances=told(batches), float32=float32)
    return {one.objective: one.level for one in Judge(SloConfig(**bounds)).look(signs, now_s=0.0, time_s=0.0)}


def test_a_restarted_engine_is_the_same_worker() -> None:
    assert of_engine(NAME, "engine-0-1f2e3d") == of_engine(NAME, "engine-0-aa") == f"{NAME}/engine-0"
    assert of_engine(NAME, "http://10.0.0.1:8000/x") == f"{NAME}/http:__10.0.0.1:8000_x"
    assert metric(of_engine(NAME, "engine-0-1f2e3d")).unit == "nats"
    for engine in ("", "ä" * 99, "a b"):
        assert declared(of_engine(NAME, engine)) is not None
    assert declared(f"{NAME}/") is None and declared("train/loss/engine-0") is None


def test_what_is_usual_is_known_after_the_first_batches_and_what_holds_is_no_single_one() -> None:
    rising = [{"engine-0-a": float(n)} for n in range(1, FIRST + 1)]
    assert told(rising[:-1]) == {"engine-0": Distance(FIRST - 2.0, None)}
    assert told([*rising, {"engine-0-b": 90.0}, {}, {"engine-0-b": 90.0}]) == {"engine-0": Distance(90.0, (FIRST + 1) / 2)}
    assert told([*rising, {"engine-0-b": 90.0}])["engine-0"].now == FIRST
    assert len(told([{f"{n}-x": 1.0} for n in range(2 * MOST_ENGINES)])) == MOST_ENGINES


FINE = [{"engine-0-a": 0.01, "engine-1-b": 0.012}] * FIRST


@pytest.mark.parametrize(
    ("batches", "float32", "levels"),
    [
        pytest.param([{"engine-0-a": 5e-8}], True, {}, id="float32, rounding"),
        pytest.param([{"engine-0-a": 2.8e-3}], True, {"logprob_float32": Level.BREACH}, id="float32, a router's bias left out"),
        pytest.param([{"engine-0-a": 8e-5}], True, {"logprob_float32": Level.WARN}, id="float32, near the bound"),
        pytest.param([{"engine-0-a": 1e-6, "engine-1-b": 4.6}], True, {"logprob_float32": Level.BREACH}, id="float32, one of two"),
        pytest.param([{"engine-0-a": 4.6}, *[{"engine-0-a": 1e-6}] * 2], True, {}, id="float32, once"),
        pytest.param([{"engine-0-a": 2.8e-3}], False, {}, id="bfloat16, rounding"),
        pytest.param([{"engine-0-a": 0.2}], False, {"logprob_bfloat16": Level.BREACH}, id="bfloat16, from the first batch on"),
        pytest.param(FINE, False, {}, id="bfloat16, usual"),
        pytest.param([*FINE, *[{"engine-1-c": 0.05}] * 2], False, {"logprob_growth": Level.BREACH}, id="bfloat16, one has grown"),
        pytest.param([*FINE, {"engine-1-c": 0.05}], False, {}, id="bfloat16, in one batch"),
        pytest.param([{}], True, {}, id="not known"),
    ],
)
def test_an_engine_whose_log_probs_are_not_the_trainers_is_found_at_once(
    batches: Sequence[dict[str, float]], float32: bool, levels: dict[str, Level]
) -> None:
    assert found(batches, float32=float32) == levels
    assert found(batches, float32=float32, logprob_float32=0.0, logprob_bfloat16=0.0, logprob_growth=0.0) == {}


def test_it_is_named_and_so_are_the_others() -> None:
    signs = Signs(numbers=replace(NOTHING), distances=told([{"engine-0-a": 1e-6, "engine-1-b": 4.6}]))
    (one,) = Judge(SloConfig()).look(signs, now_s=0.0, time_s=0.0)
    assert [cause.name for cause in one.causes] == ["foreign_logprobs"]
    assert all(text in line_of(one) for text in ("slo.logprob_float32 is 4.6", "log-probs of engine-1", "other engines 1e-06"))
