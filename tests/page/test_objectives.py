from __future__ import annotations

import pytest

from streamrl.config.slo import SloConfig
from streamrl.monitor.numbers import Cause, Finding, Level
from streamrl.page.objectives import objectives_of, worst_over
from streamrl.runtime.rundir import RunDir

OFF = dict.fromkeys(("stream_lag_s", "drop_rate", "logprob_float32", "logprob_bfloat16", "logprob_growth"), 0.0)
BOUNDS = SloConfig(p95_age=4, starvation=0.5, no_progress_s=60, **OFF)


def test_each_objective_with_a_bound_has_a_line_with_what_is_known_of_it() -> None:
    breach = Finding(objective="starvation", level=Level.BREACH, value=0.9, bound=0.5, causes=(Cause("few_producers", "why", "turn this"),))
    told = objectives_of(BOUNDS, (breach,), {"staleness/p95": 1.5, "starvation/trainer": 0.7})
    assert told["level"] == "breach"
    assert [(one["objective"], one["level"], one["value"]) for one in told["lines"]] == [
        ("p95_age", "ok", 1.5),
        ("starvation", "breach", 0.9),
        ("no_progress_s", "ok", None),
    ]
    assert told["lines"][1]["causes"] == [{"what": "why", "hint": "turn this"}]


def test_what_nobody_has_judged_is_not_ok() -> None:
    told = objectives_of(BOUNDS, None, {})
    assert told["level"] is None
    assert {one["level"] for one in told["lines"]} == {None}
    assert objectives_of(BOUNDS, (), {})["level"] == "ok"


@pytest.mark.parametrize("content", [None, b"", b"{}", b'{"slo":3}', b'{"slo":{"p95_age":"bad"}}', b"\xff"])
def test_of_a_run_that_is_over_only_a_summary_that_can_be_read_says_something(run: RunDir, content: bytes | None) -> None:
    if content is not None:
        run.summary_path.write_bytes(content)
    assert worst_over(run, BOUNDS) == {}


def test_of_a_run_that_is_over_the_worst_of_each_objective_is_said(run: RunDir) -> None:
    run.summary_path.write_bytes(b'{"steps":3,"slo":{"starvation":"warn","stream_lag_s":"breach"}}')
    assert worst_over(run, BOUNDS) == {"p95_age": "ok", "starvation": "warn", "no_progress_s": "ok"}
