from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.monitor.outcome import Outcome, conclude
from streamrl.monitor.plot import smooth, write_plot
from streamrl.monitor.summary import learning_evaluations, problem_table, summarize, summary_line, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.events import Event
from tests.monitor.conftest import MakeEntry, as_line, evaluation

KEYS = [
    "steps",
    "reward_first",
    "reward_last",
    "loss_first",
    "loss_last",
    "heldout_first",
    "heldout_last",
    "evaluations",
    "tokens_made",
    "tokens_trained",
    "staleness_p50",
    "staleness_max",
    "dropped",
    "drops",
    "failed_rollouts",
    "ended_rollouts",
    "newest_error",
    "slo",
    "swaps",
    "wall_s",
]


def test_summary_has_the_promised_keys_and_numbers(learned_run: RunView, tmp_path: Path) -> None:
    summary = summarize(learned_run, wall_s=75.25)
    write_summary(summary, tmp_path / "summary.json")
    written = json.loads((tmp_path / "summary.json").read_text())
    assert list(written) == KEYS
    rewards = [point.reward for point in learned_run.reward_points if point.reward is not None]
    assert len(rewards) == 80
    assert written["steps"] == 80
    assert written["reward_first"] == pytest.approx(sum(rewards[:20]) / 20)
    assert written["reward_last"] == pytest.approx(sum(rewards[-20:]) / 20)
    assert (written["loss_first"], written["loss_last"]) == (None, None)
    assert (written["heldout_first"], written["heldout_last"]) == (0.21, 0.91)
    assert (written["tokens_made"], written["tokens_trained"]) == (10_000, 10_000)
    assert (written["staleness_p50"], written["staleness_max"]) == (1.0, 2)
    assert (written["dropped"], written["swaps"], written["wall_s"]) == (160, 80, 75.25)


def test_the_line_tells_reward_and_heldout_before_and_after(learned_run: RunView) -> None:
    line = summary_line(summarize(learned_run, wall_s=75.0))
    assert line.startswith("80 steps in 1:15, reward 0.")
    assert "held-out 0.210 -> 0.910" in line
    assert "160 dropped, 80 swaps" in line


def test_a_run_without_evaluations_or_rewards_still_has_a_summary() -> None:
    summary = summarize(RunView("demo"), wall_s=1.0)
    assert (summary.steps, summary.reward_first, summary.heldout_last, summary.staleness_p50) == (0, None, None, 0.0)
    assert "reward" not in summary_line(summary)


def test_evaluations_before_the_end_of_the_warmup_are_no_start(learned_run: RunView) -> None:
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(18, 0.01)))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(60, 0.83)))
    assert [(one.version.number, one.accuracy) for one in learning_evaluations(learned_run)] == [(19, 0.21), (60, 0.83), (100, 0.91)]


def test_the_table_shows_the_same_problems_before_and_after(learned_run: RunView) -> None:
    table = problem_table(learned_run.evaluations)
    assert table is not None
    console = Console(width=120, record=True)
    console.print(table)
    text = console.export_text()
    row = next(line for line in text.splitlines() if "2+8=" in line)
    assert row.index("7 wrong") < row.index("10 right")
    assert "version 0.19" in text
    assert "version 0.100" in text


def test_the_reward_says_what_is_right_not_the_text(learned_run: RunView) -> None:
    answers = [("a", "#### 72", 1.0), ("b", "72", 0.0), ("c", "#### 7", 0.25)]
    problems = [{"prompt": prompt, "expected": "72", "got": got, "reward": reward} for prompt, got, reward in answers]
    for number in (19, 100):
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5, problems)))
    console = Console(width=120, record=True)
    console.print(problem_table([one for one in learned_run.evaluations if one.problems[0].prompt == "a"]))
    text = console.export_text()
    assert "#### 72 right" in text
    assert " 72 wrong" in text
    assert "#### 7 reward 0.25" in text


def test_markup_in_answers_is_shown_as_it_is(learned_run: RunView) -> None:
    for number in (19, 100):
        problems = [{"prompt": "[bold]x", "expected": "[/red]", "got": "[red]"}]
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5, problems)))
    console = Console(width=120, record=True)
    console.print(problem_table([one for one in learned_run.evaluations if one.problems[0].prompt == "[bold]x"]))
    text = console.export_text()
    assert "[bold]x" in text
    assert "[red] wrong" in text


def test_formulas_in_answers_are_shown_as_they_are(learned_run: RunView) -> None:
    for number in (19, 100):
        problems = [{"prompt": "x", "expected": r"\[x\]", "got": r"\[/x\]"}]
        learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5, problems)))
    console = Console(width=120, record=True)
    console.print(problem_table([one for one in learned_run.evaluations if one.problems[0].prompt == "x"]))
    text = console.export_text()
    assert r" \[x\] " in text
    assert r" \[/x\] wrong" in text


def test_without_a_warmup_the_first_evaluation_is_that_of_version_0(entry: MakeEntry) -> None:
    view = RunView("demo")
    view.ledger(as_line(entry(1)))
    for number in (0, 1):
        view.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(number, 0.5 + number)))
    assert [one.version.number for one in learning_evaluations(view)] == [0, 1]


def test_problems_that_only_one_of_two_evaluations_had_are_in_no_row(learned_run: RunView) -> None:
    first, last = ([{"prompt": prompt, "expected": "1", "got": "1"} for prompt in prompts] for prompts in ("ab", "bc"))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(19, 0.5, first)))
    learned_run.event(Event(kind="evaluation", worker="evaluator-0", detail=evaluation(100, 0.5, last)))
    table = problem_table([one for one in learned_run.evaluations if len(one.problems) == 2])
    assert table is not None
    assert [str(cell) for cell in table.columns[0].cells] == ["b"]


def test_there_is_no_table_without_two_evaluations(learned_run: RunView) -> None:
    assert problem_table(learned_run.evaluations[:1]) is None


def test_the_end_names_files_in_a_folder_with_brackets(learned_run: RunView, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "[" / "red]" / "demo")
    run.path.mkdir(parents=True)
    write_summary(summary := summarize(learned_run, wall_s=1.0), run.summary_path)
    console = Console(record=True, soft_wrap=True)
    Outcome(run=run, state="finished", summary=summary).print(console)
    assert f"{run.summary_path}\n" in console.export_text()


def test_the_plot_is_a_picture_of_a_size_to_look_at(learned_run: RunView, tmp_path: Path) -> None:
    from matplotlib.image import imread

    write_plot(learned_run, tmp_path / "plot.png")
    pixels = imread(tmp_path / "plot.png")
    assert pixels.shape[:2] == (780, 1170)
    assert len({tuple(pixel) for pixel in pixels[::10, ::10].reshape(-1, pixels.shape[2]).tolist()}) > 5


def test_smoothing_is_centred_and_narrows_at_the_ends() -> None:
    assert smooth([1.0, 2.0, 6.0, 4.0], 3) == [1.5, 3.0, 4.0, 5.0]
    assert smooth([], 3) == []


async def test_the_end_of_a_run_is_written_and_told(learned_run: RunView, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
    outcome = await conclude(run, learned_run, state="finished", wall_s=9.0)
    assert run.summary_path.is_file()
    assert run.plot_path.is_file()
    assert json.loads(outcome.summary_json)["steps"] == 80
    outcome.print()
    said = capsys.readouterr().out
    assert "demo finished: 80 steps in 0:09" in said
    assert str(run.plot_path) in said


async def test_a_run_that_trained_nothing_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir(tmp_path / "demo")
    run.create()
    outcome: Outcome = await conclude(run, RunView("demo"), state="stopped", wall_s=1.0)
    outcome.print()
    assert not run.summary_path.exists()
    assert capsys.readouterr().out.startswith("demo stopped; nothing")
