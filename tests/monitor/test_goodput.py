from __future__ import annotations

import pytest
from msgspec.structs import replace

from streamrl.monitor.goodput import Backlog
from streamrl.monitor.series import RUN, Series
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report
from tests.monitor.conftest import MakeEntry, as_line


def engine(name: str, tokens: int, role: str = ROLLOUT_ROLE) -> EnginePresence:
    return EnginePresence(engine=name, address="", serving=Version(0, 1), tokens_total=tokens, role=role)


def test_what_is_sampled_is_open_until_said_and_unknown_to_who_joins() -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)

    def still_open(now_s: float) -> float:
        (row,) = [row for row in view.take_rows(now_s) if row.of == RUN]
        return row.values["tokens/open"]

    view.engine("engine-0-aa", engine("engine-0-aa", 100))
    view.engine("engine-1-bb", engine("engine-1-bb", 70, EVALUATION_ROLE))
    assert still_open(1.0) == 100.0
    ended = {"tokens/published_total": 28.0, "tokens/greedy_total": 12.0, "tokens/cut_total": 10.0}
    view.metric(report("producer-0", ended, time_s=0.0))
    view.metric(report("engine-0", {"tokens/cut_total": 5.0, "tokens/sampled_total": 20.0}, time_s=0.0))
    view.metric(report("evaluator-0", {"tokens/evaluated_total": 15.0}, time_s=0.0))
    assert still_open(2.0) == 50.0
    view.engine("engine-0-cc", engine("engine-0-cc", 7))
    assert still_open(3.0) == 57.0, "an engine that was started anew counts from 0"
    view = RunView("demo", series=Series(window_s=1.0), joined=True)
    view.take_rows(0.0)
    view.metric(report("producer-0", {"tokens/published_total": 40.0}, time_s=0.0))
    assert all("tokens/open" not in row.values for row in view.take_rows(1.0))


def test_tokens_on_the_stream_are_those_that_wait_and_those_behind_the_cursor(entry: MakeEntry) -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)
    assert view.numbers(elapsed_s=1.0).stream_tokens is None
    for number, stored in ((1, 300.0), (2, 500.0)):
        metrics = {"tokens/stored_total": stored, "tokens/waiting": 70.0}
        view.ledger(as_line(replace(entry(number, cursor=10 * number), metrics=metrics)))
    view.stream(last=20, num_bytes=1)
    assert view.numbers(elapsed_s=1.0).stream_tokens == 70.0
    view.stream(last=25, num_bytes=1)
    (row,) = [row for row in view.take_rows(1.0) if row.kind == "window"]
    assert row.values["lag/stream_tokens"] == 70.0 + 5 * 800.0 / 20


def test_a_backlog_goes_by_the_newest_fork_and_is_not_always_known() -> None:
    backlog = Backlog()
    for cursor, stored in ((10, 100.0), (20, 100.0), (30, 100.0), (20, 900.0)):
        backlog.ledger(cursor, {"tokens/stored_total": stored, "tokens/waiting": 0.0})
    assert backlog.tokens(21) == pytest.approx(1000.0 / 20)
    assert backlog.tokens(3) == 0.0
    backlog = Backlog()
    for cursor, stored in ((10, 500.0), (10, 0.0)):
        backlog.ledger(cursor, {"tokens/stored_total": stored, "tokens/waiting": 0.0})
    assert backlog.tokens(20) == 500.0
    backlog = Backlog()
    backlog.ledger(10, {})
    assert backlog.tokens(20) is None
