import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from streamrl.errors import SchemaError
from streamrl.history.compare import Curve
from streamrl.monitor.decoded import evaluation_of
from streamrl.monitor.evaluations import MOST_SETS, Evaluations
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.outcome import Outcome, conclude, summed_up
from streamrl.monitor.plot import smooth, write_plot
from streamrl.monitor.screen import plain_line, reward_line
from streamrl.monitor.series import Series
from streamrl.monitor.sinks.position import Position
from streamrl.monitor.summary import learning_evaluations, problem_table, summarize, summary_line, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.events import Event
from streamrl.schemas.versions import Version
from tests.monitor.conftest import MakeEntry, evaluation, view_of
from tests.support.runs import bare_run

KEYS = (
    "steps reward_first reward_last loss_first loss_last heldout_first heldout_last evaluations tokens_made tokens_trained staleness_p50 "
    "staleness_max dropped drops failed_rollouts ended_rollouts newest_error slo swaps wall_s"
)


def test_summary_has_the_promised_keys_and_numbers(learned_run: RunView, tmp_path: Path) -> None:
    summary = summarize(learned_run, wall_s=75.25)
    write_summary(summary, tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert list(written) == KEYS.split()
    rewards = [point.reward for point in learned_run.reward_points if point.reward is not None]
    assert len(rewards) == 80
    assert (written["steps"], written["reward_first"]) == (80, pytest.approx(sum(rewards[:20]) / 20))
    assert written["reward_last"] == pytest.approx(sum(rewards[-20:]) / 20)
    assert (written["loss_first"], written["loss_last"]) == (None, None)
    assert (written["heldout_first"], written["heldout_last"]) == (0.21, 0.91)
    assert (written["tokens_made"], written["tokens_trained"]) == (10_000, 10_000)
    assert (written["staleness_p50"], written["staleness_max"]) == (1.0, 2)
    assert (written["dropped"], written["swaps"], written["wall_s"]) == (160, 80, 75.25)


@pytest.mark.parametrize(("batches", "first", "last"), [(1, 1.0, 1.0), (2, 1.0, 2.0), (7, 2.0, 6.0), (30, 8.0, 23.0), (41, 10.5, 31.5)])
def test_the_rewards_before_and_after_share_no_batch(entry: MakeEntry, batches: int, first: float, last: float) -> None:
    view = view_of(*(entry(number, reward=float(number)) for number in range(1, batches + 1)))
    summary = summarize(view, wall_s=1.0)
    assert (summary.reward_first, summary.reward_last) == (first, last)
    curve = Curve(numbers=tuple(range(batches)), values=tuple(float(number + 1) for number in range(batches)))
    assert (curve.first, curve.last) == (first, last)


def test_an_end_before_the_ledger_was_read_claims_nothing_of_what_was_trained(learned_run: RunView, tmp_path: Path) -> None:
    run = bare_run(tmp_path / "demo")
    assert summed_up(run, None, state="killed").unread is False, "a run that never began"
    run.config_path.touch()
    history = RunView("demo")
    history.live = False
    for view in (None, history):
        found = summed_up(run, view, state="killed", exit_code=130)
        assert (found.summary, found.unread, found.exit_code) == (None, True, 130)
    told = summed_up(run, learned_run, state="killed")
    assert told.summary is not None and (told.summary.steps, told.unread) == (80, False)
    assert summed_up(run, history, state="killed") == Outcome(run=run, state="killed", summary=told.summary, unread=True)


def test_the_line_tells_reward_and_heldout_before_and_after(learned_run: RunView) -> None:
    line = summary_line(summarize(learned_run, wall_s=75.0))
    assert line.startswith("80 steps in 1:15, reward 0.")
    assert "held-out 0.210 -> 0.910" in line and "160 dropped, 80 swaps" in line


def test_runs_without_evaluations_or_rewards_and_problems_of_one_evaluation(learned_run: RunView) -> None:
    summary = summarize(RunView("demo"), wall_s=1.0)
    assert (summary.steps, summary.reward_first, summary.heldout_last, summary.staleness_p50) == (0, None, None, 0.0)
    assert "reward" not in summary_line(summary)
    first, last = ([{"prompt": prompt, "expected": "1", "got": "1"} for prompt in prompts] for prompts in ("ab", "bc"))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(19, 0.5, first)))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(100, 0.5, last)))
    table = problem_table([one for one in learned_run.evaluations if len(one.problems) == 2])
    assert table is not None and [str(cell) for cell in table.columns[0].cells] == ["b"]
    assert problem_table(learned_run.evaluations[:1]) is None


def test_evaluations_of_the_warm_up_are_no_start_and_without_one_version_0_is(learned_run: RunView, entry: MakeEntry) -> None:
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(18, 0.01)))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(60, 0.83)))
    assert [(one.version.number, one.accuracy) for one in learning_evaluations(learned_run)] == [(19, 0.21), (60, 0.83), (100, 0.91)]
    view = view_of(entry(1))
    for number in (0, 1):
        view.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5 + number)))
    assert [one.version.number for one in learning_evaluations(view)] == [0, 1]


def test_the_table_shows_the_same_problems_before_and_after(learned_run: RunView) -> None:
    table = problem_table(learned_run.evaluations)
    assert table is not None
    console = Console(width=120, record=True)
    console.print(table)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "2+8=" in line)
    assert row.index("7 wrong") < row.index("10 right")
    assert "version 0.19" in text and "version 0.100" in text


@pytest.mark.parametrize(
    ("problems", "shown"),
    [
        (
            [
                {"prompt": prompt, "expected": "72", "got": got, "reward": reward}
                for prompt, got, reward in (("a", "#### 72", 1.0), ("b", "72", 0.0), ("c", "#### 7", 0.25))
            ],
            ["#### 72 right", " 72 wrong", "#### 7 reward 0.25"],
        ),
        ([{"prompt": "[bold]x", "expected": "[/red]", "got": "[red]"}], ["[bold]x", "[red] wrong"]),
        ([{"prompt": "x", "expected": r"\[x\]", "got": r"\[/x\]"}], [r" \[x\] ", r" \[/x\] wrong"]),
    ],
    ids=["rewards", "markup", "formulas"],
)
def test_the_reward_says_what_is_right_and_text_is_as_it_is(learned_run: RunView, problems: list[dict[str, Any]], shown: list[str]) -> None:
    for number in (19, 100):
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5, problems)))
    console = Console(width=120, record=True)
    console.print(problem_table([one for one in learned_run.evaluations if one.problems[0].prompt == problems[0]["prompt"]]))
    text = console.export_text()
    assert [words for words in shown if words not in text] == []


def test_the_end_names_files_in_a_folder_with_brackets(learned_run: RunView, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "[" / "red]" / "demo")
    run.path.mkdir(parents=True)
    write_summary(summary := summarize(learned_run, wall_s=1.0), run.summary_path)
    console = Console(record=True, soft_wrap=True)
    Outcome(run=run, state="finished", summary=summary).print(console)
    assert f"{run.summary_path}\n" in console.export_text()


def test_smoothing_is_centred_and_the_plot_is_a_picture(learned_run: RunView, tmp_path: Path) -> None:
    assert smooth([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert smooth([], 3) == []
    from matplotlib.image import imread

    write_plot(learned_run, tmp_path / "plot.png")
    pixels = imread(tmp_path / "plot.png")
    assert pixels.shape[:2] == (780, 1170)
    assert len({tuple(pixel) for pixel in pixels[::10, ::10].reshape(-1, pixels.shape[2]).tolist()}) > 5


async def test_the_end_of_a_run_is_written_and_told_unless_nothing_was_trained(
    learned_run: RunView, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = bare_run(tmp_path / "demo")
    outcome = await conclude(run, learned_run, state="finished", wall_s=9.0)
    assert run.summary_path.is_file()
    assert run.plot_path.is_file()
    assert json.loads(outcome.summary_json)["steps"] == 80
    outcome.print()
    said = capsys.readouterr().out
    assert "demo finished: 80 steps in 0:09" in said and str(run.plot_path) in said
    run = bare_run(tmp_path / "empty")
    outcome = await conclude(run, RunView("demo"), state="stopped", wall_s=1.0)
    outcome.print()
    assert not run.summary_path.exists()
    assert capsys.readouterr().out.startswith("empty stopped; nothing")


def told(name: str, number: int, accuracy: float | None, **more: Any) -> Event:
    detail = {"set": name, "version": f"0.{number}", "versions": [f"0.{number}"] * 2, "accuracy": accuracy, "num": 4, "problems": []}
    return Event(kind="evaluation", worker="evaluator-0", detail=detail | more, time_s=float(number))


SUMS = {
    "samples": 32,
    "answered": 30,
    "truncated": 3,
    "pass": {"1": {"value": 0.5, "low": 0.4, "high": 0.6, "problems": 4}, "8": {"value": 0.75, "low": 0.5, "high": 1.0, "problems": 4}},
    "majority": {"8": {"value": 0.6, "low": 0.5, "high": 1.0, "problems": 4}},
    "tokens": {"mean": 12.0, "p50": 11.0, "p95": 20.0, "sum": 384.0},
    "took_s": 2.0,
}


def told_of(*events: Event) -> RunView:
    view = RunView("run", steps=10)
    view.series = Series(evaluated=Position().has)
    for event in events:
        view.event(event)
    return view


def test_an_event_is_read_with_all_that_it_says() -> None:
    found = evaluation_of(told("sums", 3, 0.5, pinned=True, interval=[0.4, 0.6], **SUMS))
    assert (found.set, found.accuracy, found.interval, found.pinned) == ("sums", 0.5, (0.4, 0.6), True)
    assert (found.passes, found.majorities) == ({1: 0.5, 8: 0.75}, {8: 0.6})
    assert (found.truncated_ratio, found.failed_ratio, found.response_len, found.took_s) == (0.1, 2 / 32, 12.0, 2.0)


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a\n"])
def test_a_set_of_another_name_is_no_evaluation(name: str) -> None:
    with pytest.raises(SchemaError):
        evaluation_of(told(name, 3, 0.5))


def test_the_first_set_is_that_of_the_held_out_rows() -> None:
    view = told_of(told("sums", 1, 0.25, **SUMS), told("heldout", 1, 0.5), told("sums", 2, None), told("words", 2, 0.125))
    numbers = view.numbers(elapsed_s=1.0)
    assert numbers.heldout == 0.5
    assert [(one.set, one.accuracy) for one in numbers.evaluations] == [("sums", None), ("words", 0.125)]
    assert "heldout=0.500 words=0.125" in plain_line(numbers)
    assert [part.text.strip() for part in reward_line(numbers)][-3:] == ["held-out 0.500", "sums -", "words 0.125"]
    found = summarize(view, wall_s=1.0)
    assert (found.heldout_first, found.heldout_last) == (0.5, 0.5)
    ends = {name: (one.first, one.last) for name, one in found.evaluations.items()}
    assert ends == {"sums": (0.25, None), "heldout": (0.5, 0.5), "words": (0.125, 0.125)}


def test_every_set_has_its_rows_up_to_so_many() -> None:
    view = told_of(told("sums", 1, 0.25, **SUMS), told("words", 1, None))
    [row] = [row for row in view.take_rows(0.0) if row.kind == "evaluation"]
    assert (row.values["eval/sums"], row.values["eval/sums-pass@8"]) == (0.25, 0.75)
    kept = Evaluations()
    for number in range(MOST_SETS + 5):
        one = Evaluation(version=Version(0, 1), accuracy=0.5, num=1, set=f"s{number}")
        assert kept.add(one, last_cold=-1) == (number < MOST_SETS)
    assert len(kept.sets) == MOST_SETS
