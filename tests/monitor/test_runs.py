"""The list of runs from their files, notes, and the keys of `status --json` of a run that is up and of one that has ended."""

import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import fields

from streamrl.config.tree import Config, ModelConfig, RunConfig
from streamrl.errors import ConfigError
from streamrl.monitor.glance import glance_of, verdict_over, with_verdict
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.report import Report, report_of
from streamrl.monitor.run_state import REMOVING, RunState, read_state, write_state
from streamrl.monitor.runs import MOST_NOTE_CHARS, RunLine, bytes_on_disk, describe, list_runs, print_runs, read_note, size_text, write_note
from streamrl.monitor.summary import Summary, summarize, write_summary
from streamrl.monitor.view import RunView
from streamrl.runtime.lock import lock_run
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from tests.support.runs import named_run

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return named_run(tmp_path / "demo", model=ModelConfig(path="/hub/models--Qwen--Qwen3-0.6B/snapshots/abc"))


@pytest.fixture
def numbers(learned_run: RunView) -> RunNumbers:
    return with_verdict(learned_run, learned_run.numbers(elapsed_s=65.0), verdict_over(learned_run))


def summary_of(**values: float) -> Summary:
    counts = {"steps": 7, "tokens_made": 1, "tokens_trained": 2, "staleness_p50": 0.0, "staleness_max": 1, "dropped": 0, "swaps": 3}
    ends = {"reward_first": None, "reward_last": None, "heldout_first": None, "heldout_last": None}
    return msgspec.convert(counts | ends | {"wall_s": 4.0} | values, Summary)


def test_the_list_says_what_the_files_say(run: RunDir) -> None:
    write_summary(summary_of(reward_first=0.25, reward_last=0.75, heldout_first=0.5, heldout_last=0.625), run.summary_path)
    write_state(run, RunState(state="finished", step=7, steps=9))
    write_note(run, "  the first\nthat learns ")
    os.utime(run.config_path, (1000, 1000))
    os.utime(run.summary_path, (2000, 2000))
    os.utime(run.state_path, (1500, 1500))
    (line,) = list_runs(run.path.parent)
    assert (line.run, line.state, line.step, line.steps) == ("demo", "finished", 7, 9)
    assert (line.reward_first, line.reward_last, line.heldout_first, line.heldout_last) == (0.25, 0.75, 0.5, 0.625)
    assert (line.began_s, line.ended_s, line.model, line.note) == (1000, 2000, "Qwen/Qwen3-0.6B", "the first\nthat learns")
    assert line.bytes == bytes_on_disk(run.path) > 0
    with lock_run(run):
        line = describe(run)
    assert (line.state, line.supervisor, line.ended_s) == ("running", os.getpid(), None)


def test_a_run_that_is_up_has_the_rewards_that_its_supervisor_wrote_last(run: RunDir, numbers: RunNumbers) -> None:
    write_summary(summary_of(reward_first=0.9, reward_last=0.9), run.summary_path)
    write_state(run, RunState(state="running", step=3, steps=9, glance=glance_of(numbers)))
    with lock_run(run):
        line = describe(run)
    assert numbers.reward is not None and numbers.reward_first is not None
    assert (line.reward_first, line.reward_last) == (numbers.reward_first, numbers.reward)
    assert (line.heldout_first, line.heldout_last) == (numbers.heldout_first, numbers.heldout)


@pytest.mark.parametrize(
    ("files", "state", "model"),
    [
        ({"config.json": '{"run": {"name": "demo", "warp": 9}, "model": {"path": "/m/new", "shape": []}, "later": 1}'}, "stopped", "new"),
        ({"config.json": '{"model": {"path": 3}}'}, "stopped", ""),
        ({"config.json": "{", "state.json": "[", "summary.json": "\0", "note.txt": "kept"}, "stopped", ""),
        ({"state.json": '{"state": "paused", "later": true}'}, "paused", "Qwen/Qwen3-0.6B"),
        ({BRANCH_FILE: '{"parent": "root", "later": true}'}, "interrupted", "Qwen/Qwen3-0.6B"),
        ({BRANCH_FILE: "{"}, "stopped", "Qwen/Qwen3-0.6B"),
    ],
    ids=["later version", "another type", "damaged", "unknown state", "branch", "damaged branch"],
)
def test_a_run_of_another_version_or_with_damaged_files_is_listed(run: RunDir, files: dict[str, str], state: str, model: str) -> None:
    for name, text in files.items():
        (run.path / name).write_text(text)
    (line,) = list_runs(run.path.parent)
    assert (line.state, line.model, line.note) == (state, model, files.get("note.txt", ""))


def test_a_branch_is_finished_once_its_summary_is_there_with_rewards_that_were_recorded(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / BRANCH_FILE).write_text('{"parent": "root"}')
    with lock_run(run):
        assert (describe(run).state, describe(run).parent) == ("running", "root")
    write_summary(summary_of(reward_last=0.5), run.summary_path)
    assert describe(run).state == "finished"
    print_runs([describe(run)], as_json=False)
    assert "(recorded)" in capsys.readouterr().out


def test_a_link_to_a_run_is_listed_with_its_size_and_a_broken_one_is_not(run: RunDir, tmp_path: Path) -> None:
    base = tmp_path / "links"
    base.mkdir()
    (base / "there").symlink_to(run.path)
    (base / "gone").symlink_to(tmp_path / "nothing")
    (line,) = list_runs(base)
    assert (line.run, line.bytes) == ("there", bytes_on_disk(run.path))


def test_sizes_count_a_file_once_and_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one").write_bytes(b"x" * 100_000)
    alone = bytes_on_disk(tmp_path / "a")
    (tmp_path / "outside").write_bytes(b"x" * 1_000_000)
    os.link(tmp_path / "a" / "one", tmp_path / "a" / "two")
    (tmp_path / "a" / "link").symlink_to(tmp_path / "outside")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert 100_000 <= alone <= bytes_on_disk(tmp_path / "a") < 200_000
    assert bytes_on_disk(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("count", "text"), [(None, "-"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (4e12, "4.0 TB")]
)
def test_sizes_in_words(count: int | None, text: str) -> None:
    assert size_text(count) == text


def test_a_note_is_replaced_removed_and_bounded(run: RunDir) -> None:
    assert read_note(run) == ""
    write_note(run, "one")
    write_note(run, "\x1b[2Jtwo \N{HIRAGANA LETTER A}")
    assert read_note(run) == "\x1b[2Jtwo \N{HIRAGANA LETTER A}"
    for text in ("x" * (MOST_NOTE_CHARS + 1), "bytes \udcff"):
        with pytest.raises(ConfigError):
            write_note(run, text)
    assert read_note(run).endswith("two \N{HIRAGANA LETTER A}")
    write_note(run, "")
    write_note(run, "")
    assert not run.note_path.exists()


def test_the_table_holds_no_command_for_a_terminal_and_folds_nothing_in_a_pipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    line = RunLine(run="a\x1b[2J", path="/r/a", state="running", supervisor=1, summary=None, note="[red]\x1b\nnote", model="m" * 100)
    print_runs([line, msgspec.structs.replace(line, run="b", loss_first=2.0, loss_last=1.0)], as_json=False)
    title, first, second, last = capsys.readouterr().out.splitlines()
    assert title.split() == ["run", "state", "started", "steps", "reward", "held-out", "model", "size", "note"]
    assert "\x1b" not in first and "[red]" in first and "m" * 100 in first
    assert "loss 2.000 -> 1.000" in second
    assert last.startswith("2 runs in /r,")


def keys_of(report: Report) -> list[str]:
    return list(json.loads(msgspec.json.encode(report)))


def test_a_run_that_is_up_and_one_that_has_ended_are_told_by_the_same_keys(run: RunDir, learned_run: RunView, numbers: RunNumbers) -> None:
    write_state(run, RunState(state="running", step=1, steps=9))
    with lock_run(run):
        up = report_of(describe(run), numbers, last=read_state(run), checkpoints=("0.9",))
        away = report_of(describe(run), None, last=read_state(run), checkpoints=("0.9",))
    assert (up.live, up.away, up.state, up.step, up.version, up.wall_s) == (True, "", "running", numbers.step, numbers.version, 65.0)
    assert (up.steps_per_minute, up.rollouts_per_s) == (numbers.steps_per_minute, numbers.rollouts_per_s)
    assert (up.engines, up.workers, up.verdict) == (numbers.engines, numbers.workers, numbers.verdict and numbers.verdict.text)
    assert (away.live, away.state, away.step, away.version, away.made_per_s) == (False, "running", 1, "0.9", None)
    assert "bus" in away.away
    write_state(run, RunState(state="finished", step=numbers.step, steps=9, glance=glance_of(numbers)))
    write_summary(summarize(learned_run, wall_s=65.0), run.summary_path)
    ended = report_of(describe(run), None, last=read_state(run))
    assert (ended.live, ended.away, ended.state, ended.made_per_s, ended.workers) == (False, "", "finished", None, ())
    for key in ("step", "version", "reward", "reward_first", "heldout", "heldout_first", "verdict", "learning", "tokens_trained", "drops"):
        assert getattr(ended, key) == getattr(up, key), key
    assert keys_of(up) == keys_of(away) == keys_of(ended)


def test_rollouts_a_second_are_those_of_the_newest_batches(numbers: RunNumbers, learned_run: RunView) -> None:
    assert numbers.steps_per_minute is not None and numbers.rollouts_per_s is not None
    each = learned_run.trained.rollouts_a_batch(20)
    assert each > 0 and numbers.rollouts_per_s == pytest.approx(each * numbers.steps_per_minute / 60)


def test_a_run_whose_removal_has_begun_is_told_apart(run: RunDir) -> None:
    write_state(run, RunState(state=REMOVING))
    assert describe(run).state == REMOVING
    with lock_run(run):
        assert describe(run).state == REMOVING


@pytest.mark.parametrize(("title", "struct"), [("### `streamrl status RUN --json`", Report), ("### `streamrl runs --json`", RunLine)])
def test_the_keys_are_documented(title: str, struct: type[msgspec.Struct]) -> None:
    section = OPERATIONS.read_text(encoding="utf-8").split(f"\n{title}\n")[1].split("\n#")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert [key for row in rows for key in re.findall(r"`(\w+)`", row)] == [field.name for field in fields(struct)]


def test_a_folder_is_named_by_its_own_name_also_where_the_configuration_has_another(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "moved")
    run.create()
    run.write_config(Config(run=RunConfig(name="former")))
    assert [line.run for line in list_runs(tmp_path)] == ["moved"]
