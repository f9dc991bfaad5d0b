from __future__ import annotations

from streamrl.monitor.series import RUN, Series
from streamrl.monitor.view import RunView
from streamrl.schemas.control import EVALUATION_ROLE, ROLLOUT_ROLE, EnginePresence
from streamrl.schemas.versions import Version
from streamrl.telemetry.metrics import report


def engine(name: str, tokens: int, role: str = ROLLOUT_ROLE) -> EnginePresence:
    return EnginePresence(engine=name, address="", serving=Version(0, 1), tokens_total=tokens, role=role)


def test_what_is_sampled_is_open_until_somebody_says_what_became_of_it() -> None:
    view = RunView("demo", series=Series(window_s=1.0))
    view.take_rows(0.0)

    def still_open(now_s: float) -> float:
        (row,) = [row for row in view.take_rows(now_s) if row.of == RUN]
        return row.values["tokens/open"]

    view.engine("engine-0-aa", engine("engine-0-aa", 100))
    view.engine("engine-1-bb", engine("engine-1-bb", 70, EVALUATION_ROLE))
    assert still_open(1.0) == 100.0
    view.metric(report("producer-0", {"tokens/published_total": 40.0, "tokens/cut_total": 10.0}, time_s=0.0))
    view.metric(report("engine-0", {"tokens/cut_total": 5.0, "tokens/sampled_total": 20.0}, time_s=0.0))
    view.metric(report("evaluator-0", {"tokens/evaluated_total": 15.0}, time_s=0.0))
    assert still_open(2.0) == 50.0
    view.engine("engine-0-cc", engine("engine-0-cc", 7))
    assert still_open(3.0) == 57.0, "an engine that was started anew counts from 0"


def test_who_joins_a_run_does_not_know_what_was_sampled_before() -> None:
    view = RunView("demo", series=Series(window_s=1.0), joined=True)
    view.take_rows(0.0)
    view.metric(report("producer-0", {"tokens/published_total": 40.0}, time_s=0.0))
    assert all("tokens/open" not in row.values for row in view.take_rows(1.0))
