"""Numbers and texts that any login may store: whatever they are, a run goes on being shown and looked at."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from streamrl.config.slo import SloConfig
from streamrl.monitor.board import Board
from streamrl.monitor.drawing import Ink
from streamrl.monitor.look import Look
from streamrl.monitor.screen import plain_line, warnings
from streamrl.monitor.series import Series
from streamrl.monitor.slo import Judge, Signs, detail_of
from streamrl.monitor.summary import summarize
from streamrl.monitor.untrained import barren_line
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import diagnose
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import EnginePresence, Grant, WorkerPresence
from streamrl.schemas.events import MetricReport
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import METRICS

NUMBERS = (math.nan, math.inf, -math.inf, 1e308, 2.0**63, -(2.0**63), -1.0)


def shown(view: RunView) -> str:
    """Everything that is made of a view about once a second, and at the end."""
    view.mark(1.0)
    view.mark(2.0)
    view.take_rows(5.0, end=True)
    numbers = view.numbers(elapsed_s=1.0)
    assert view.series is not None
    signs = Signs(numbers=numbers, window=view.series.window, decided=view.series.decided, stones=view.failures.all_reasons)
    judge = Judge(SloConfig(p95_age=1.0, versions_behind=1.0, starvation=0.5, hold_s=0.0))
    msgspec.json.encode((detail_of(judge.look(signs, now_s=1.0, time_s=1.0)), numbers, summarize(view, wall_s=1.0)))
    lines = [plain_line(numbers), barren_line(numbers, view.failures.all_reasons), diagnose(numbers).what]
    lines += [text for _, text in warnings(numbers)]
    return "\n".join([*lines, *Board(Look(run="demo", state="running", numbers=numbers), 100, Ink.NONE).text()])


@pytest.mark.parametrize("reduction", ["mean", "max", "sum", "last"])
@pytest.mark.parametrize("value", NUMBERS)
def test_reports_of_any_number(reduction: str, value: float) -> None:
    for names in ([name] for name in METRICS if name.startswith(("producer/", "reward/", "engine/", "trainer/"))):
        view = RunView("demo", steps=100, series=Series(window_s=0.0))
        for worker in ("producer-0", "producer-1"):
            given: dict[str, Any] = {reduction: dict.fromkeys(names, value)}
            view.metric(decode(encode(MetricReport(worker=worker, **given)), MetricReport))
        assert 0 <= view.numbers(elapsed_s=1.0).tasks_in_flight <= 2e9
    view = RunView("demo", steps=100, series=Series(window_s=0.0))
    everything: dict[str, Any] = {reduction: dict.fromkeys(METRICS, value)}
    view.metric(MetricReport(worker="producer-0", **everything))
    assert shown(view)


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63)])
def test_presences_and_grants_of_any_number_and_states_of_any_length(number: int) -> None:
    view = RunView("demo", steps=100, series=Series(window_s=0.0))
    counts = dict.fromkeys(("running", "waiting", "slots", "tokens_total", "swaps_total", "max_len"), number)
    view.engine("engine-0-a", EnginePresence(engine="engine-0-a", address="x", serving=Version(0, 2**62), **counts))
    view.grant(Grant(granted=number, version=number, retired=number))
    for name, since_s in zip(("trainer-0", "producer-0", "engine-0"), NUMBERS, strict=False):
        detail = {"dead": number, "unrewarded": number, "ended": {"stale": number, "failed": number}}
        presence = WorkerPresence(worker=name, kind=name[:-2], state="x" * 1_000_000, since_s=since_s, detail=detail)
        view.worker(name, decode(encode(presence), WorkerPresence))
    assert len(shown(view)) < 50_000
