from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import pytest

from streamrl.errors import BusUnavailable, SchemaError
from streamrl.schemas.codec import decode
from streamrl.schemas.events import MetricReport
from streamrl.telemetry.metrics import Fold, MetricsSink, report
from streamrl.telemetry.names import METRICS, Reduction, metric

ROOT = Path(__file__).parents[2]


def test_a_report_groups_values_by_their_declared_reduction() -> None:
    made = report("engine-0", {"engine/tokens_total": 5, "engine/swap_ms": 0.5, "train/loss": 1.5}, time_s=7.0)
    assert made == MetricReport(
        worker="engine-0",
        sum={"engine/tokens_total": 5.0},
        max={"engine/swap_ms": 0.5},
        mean={"train/loss": 1.5},
        time_s=7.0,
    )


def test_values_that_are_not_finite_are_left_out() -> None:
    assert report("w", {"train/loss": math.nan, "train/tis": math.inf}, time_s=0.0).mean == {}


def test_an_undeclared_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(SchemaError, match="train/los'") as caught:
        report("w", {"train/los": 1.0}, time_s=0.0)
    assert "did you mean 'train/loss'?" in caught.value.hint


def test_reports_fold_by_reduction() -> None:
    fold = Fold()
    for loss, tokens, swap in ((1.0, 10, 0.5), (2.0, 20, 0.1), (6.0, 30, 0.2)):
        fold.add(report("w", {"train/loss": loss, "engine/tokens_total": tokens, "engine/swap_ms": swap}, time_s=0.0))
    fold.add(MetricReport(worker="w", last={"some/level": 4.0}))
    fold.add(MetricReport(worker="w", last={"some/level": 3.0}))
    assert fold.values == pytest.approx({"train/loss": 3.0, "engine/tokens_total": 60.0, "engine/swap_ms": 0.5, "some/level": 3.0})


async def test_the_sink_publishes_messagepack() -> None:
    bodies: list[bytes] = []

    async def publish(body: bytes) -> None:
        bodies.append(body)

    await MetricsSink("trainer-0", publish).put({"train/loss": 2.0})
    received = decode(bodies[0], MetricReport)
    assert (received.worker, received.mean) == ("trainer-0", {"train/loss": 2.0})
    assert received.time_s > 0


async def test_a_bus_that_is_away_costs_the_report_only(caplog: pytest.LogCaptureFixture) -> None:
    async def publish(body: bytes) -> None:
        raise BusUnavailable("the bus is away")

    sink = MetricsSink("trainer-0", publish)
    with caplog.at_level(logging.WARNING):
        await sink.put({"train/loss": 2.0})
    assert sink.num_lost == 1
    assert "event=metrics_lost worker=trainer-0 lost=1" in caplog.text
    with pytest.raises(SchemaError):
        await sink.put({"no/such_name": 1.0})


def test_names_follow_the_pattern_and_totals_add_up() -> None:
    for name, declared in METRICS.items():
        assert re.fullmatch(r"[a-z]+/[a-z0-9_]+", name), name
        assert name.endswith("_total") == (declared.reduction is Reduction.SUM), name
        assert declared.unit, name
        assert declared.meaning, name
    assert metric("train/loss").name == "train/loss"


def test_every_metric_name_in_the_source_is_declared() -> None:
    areas = "|".join(sorted({name.partition("/")[0] for name in METRICS}))
    literal = re.compile(rf'"((?:{areas})/[a-z0-9_]+)"')
    used: set[str] = set()
    for folder in ("streamrl", "producers", "consumers"):
        for path in (ROOT / folder).rglob("*.py"):
            used.update(literal.findall(path.read_text(encoding="utf-8")))
    assert used - METRICS.keys() == set()
    assert "rollout/raw_reward" in used
