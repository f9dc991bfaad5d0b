"""`streamrl reward --check`: a file of answers graded by a reward, and everything about it that can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.tree import DataConfig
from streamrl.errors import ConfigError, DataError
from streamrl.history import grade_file
from streamrl.history.grade_file import read_rows
from tests.support.errors import raises
from tests.support.printed import printed
from tests.support.refusals import refused

CODE = """
import os
import time


def score(task, episode, bonus=0.0):
    match episode.completion:
        case "hang":
            time.sleep(3600)
        case "die":
            os._exit(3)
        case "nan":
            return float("nan")
    return {"right": float(episode.completion == task.label), "bonus": bonus, "turns": float(len(episode.turns)) * task.metadata["weight"]}
"""


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(completion: str, **fields: Any) -> dict[str, Any]:
    return {"prompt": "3+4=", "label": "7", "completion": completion, "metadata": {"weight": 0.0}, **fields}


def told(place: Path, capsys: pytest.CaptureFixture[str], reward: str, *rows: dict[str, Any]) -> dict[str, Any]:
    """Return what the check of these rows by a run's reward prints; some of them are wrong."""
    (place / "run.toml").write_text(f'[data]\ntrain = "rows.jsonl"\n{reward}')
    checked = write(place / "rows.jsonl", *rows)
    return json.loads(printed(capsys, "reward", place / "run.toml", "--check", checked, "--json", code=1).out)


@pytest.mark.process
def test_every_grader_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "code.py").write_text(CODE)
    reward = '[reward]\nkind = "code.py:score"\ntimeout_s = 1.5\nchildren = 1\noptions.bonus = 0.5\n'
    several = {**row("", expected=2.5, metadata={"weight": 0.5}), "turns": ["6", "7"]}
    del several["completion"]
    rows = (row("7", expected=1.5), row("8", expected=1.5), row("nan"), row("die", expected=1), row("hang"), several)
    heard = told(tmp_path, capsys, reward, *rows)
    found = {one["line"]: one for one in heard["rows"]}
    assert [found[line]["reward"] for line in range(1, 7)] == [1.5, 0.5, None, None, None, 2.5]
    assert found[6]["parts"] == {"right": 1.0, "bonus": 0.5, "turns": 1.0}
    assert "must be finite" in found[3]["error"] and "exit code 3" in found[4]["error"] and "1.5 s of user code" in found[5]["error"]
    assert [line for line in found if found[line]["timed_out"]] == [5] and found[5]["seconds"] >= 1.4
    assert heard["summary"] == {"rows": 6, "mean": 1.5, "failed": 3, "timed_out": 1, "differ": 2}


def test_a_file_that_holds_is_said_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = write(tmp_path / "rows.jsonl", row("7", expected=1), row("8", expected=0), row("\x1b[2J"))
    out = printed(capsys, "reward", "--check", rows, "--kind", "exact_match").out
    assert "0.333333" in out and "\x1b" not in out
    write(tmp_path / "rows.jsonl", row("8", expected=1))
    assert "differs" in printed(capsys, "reward", "--check", rows, "--kind", "exact_match", code=1).out


@pytest.mark.process
def test_rows_have_their_own_rewards_and_parts_as_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = 'reward_key = "grade"\nreward_options = { gsm8k = { marked_only = true } }\n[reward]\nkind = "math"\nchildren = 1\n'
    rows = (
        row("14/2", expected=0),  # right, and the part that is trained is whether it was boxed
        row("\\boxed{8}", expected=1),
        row("7.0", expected=0, grade="exact_match"),
        row("7", expected=0, grade="gsm8k"),
        row("7", expected=1, grade={"kind": "gsm8k", "options": {"marked_only": False}}),
    )
    found = told(tmp_path, capsys, f'{reward}key = "boxed"\n', *rows)["rows"]
    # A row's own reward has to have the part, too.
    assert [one["reward"] for one in found] == [0.0, 1.0, None, None, None]
    assert "reward.key = 'boxed'" in found[2]["error"] and found[0]["parts"] == {"answer": 1.0, "boxed": 0.0}
    assert [one["reward"] for one in told(tmp_path, capsys, reward, *rows)["rows"]] == [1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.process
def test_a_built_in_reward_that_may_hang_is_asked_in_a_process_that_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def here(*_: Any, **__: Any) -> None:
        raise AssertionError("built in this process")

    monkeypatch.setattr(grade_file, "make_reward", here)
    rows = write(tmp_path / "rows.jsonl", row("\\boxed{14/2}", expected=1))
    assert main(["reward", "--check", rows, "--kind", "boxed_math"]) == 0
    with pytest.raises(AssertionError, match="built in this process"):
        main(["reward", "--check", rows, "--kind", "exact_match"])


def test_a_prompt_that_opens_a_thought_is_one(tmp_path: Path) -> None:
    rows = [
        row(text, prompt=prompt, expected=expected)
        for prompt, text, expected in (
            ("3+4=<think>\n", "#### 7", 0.0),
            ("3+4=<think>\n", "hm</think>#### 7", 1.0),
            ("3+4=<think>\n\n</think>\n\n", "#### 7", 1.0),
        )
    ]
    assert main(["reward", "--check", write(tmp_path / "rows.jsonl", *rows), "--kind", "gsm8k"]) == 0


def test_broken_rows_and_wrong_rewards_are_named_by_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"completion": "7", "grade": "gsm8k"}\n{"completion": "7", "grade": "gsm8"}\n')
    with refused(DataError, "line 2: ", "'gsm8'", path=str(path), line=2):
        read_rows(path, DataConfig(reward_key="grade"))
    with raises(DataError, path=str(path), line=1):  # and a field that no configuration has named is none
        read_rows(path)
    path = tmp_path / "rows.jsonl"
    path.write_text("{}\n" * 12)
    with refused(DataError, "line 5: ", "7 more lines", line=1):
        read_rows(path)
    path.write_text("\n")
    with pytest.raises(DataError, match="got none"):
        read_rows(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_rows(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"no json", "JSON is malformed"),
        (b'{"prompt": "a", "completion": "7"', "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"prompt": "a"}', "either completion or turns"),
        (b'{"completion": "7", "turns": ["7"]}', "either completion or turns"),
        (b'{"completion": 7}', "$.completion"),
        (b'{"completion": "7", "expected": "1"}', "$.expected"),
        (b'{"completion": "7", "expectd": 1}', "expectd"),
        (b'{"completion": "7", "metadata": 3}', "$.metadata"),
        (b'{"completion": "\xff"}', "utf-8"),
        (b'{"completion": "7", "label": ' + b"[" * 100_000, "recursion"),
    ],
)
def test_a_broken_row_is_named_by_its_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"completion": "7"}\n\n' + line + b"\n")
    with raises(DataError, path=str(path), line=3) as caught:
        read_rows(path)
    assert "line 3: " in caught.value.message and said.lower() in caught.value.message.lower()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--check", "ROWS"), "neither RUN nor --kind"),
        (("--check", "ROWS", "--kind", "exact_match", "--task", "1"), "no --task with --check"),
        (("--check", "ROWS", "--kind", "exact_match", "--wait", "1"), "no --wait with --check"),
        (("--check", "ROWS", "--kind", "late"), "computes itself"),
        pytest.param(("--check", "ROWS", "--kind", "code.py:none"), "none", marks=pytest.mark.process),
        (("--check", "ROWS", "--kind", "gsm8k", "--options", "[1]"), "--options as a JSON table"),
        (("--check", "ROWS", "--kind", "gsm8k", "--options", '{"odd": 1}'), "odd"),
        (("--check", "ROWS", "nowhere"), "nowhere"),
        (("--check", "ROWS", "nowhere", "--options", "{}"), "--options without --kind"),
        (("run", "--task", "1", "--rollout", "0"), "--reward without --check"),
        (("--task", "1", "--rollout", "0", "--reward", "1"), "expected RUN"),
        (("run", "--task", "1", "--rollout", "0", "--reward", "1", "--kind", "gsm8k"), "no --kind without --check"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code.py").write_text(CODE)
    rows = write(tmp_path / "rows.jsonl", row("7"))
    try:
        code = main(["reward", *(rows if word == "ROWS" else word for word in words)])
    except ConfigError as error:
        code, text = 1, error.message
    else:
        text = capsys.readouterr().err
    assert code and said in text


@pytest.mark.process
@pytest.mark.parametrize("kind", ["math", "code.py:score"])
def test_the_trained_part_is_what_is_compared_and_what_hangs_is_ended(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "code.py").write_text(CODE)
    key, label, hangs = ("boxed", "8", "x^{100}(1+x)^{999}") if kind == "math" else ("bonus", "8", "7")
    wrong = row(r"\boxed{7}", label=label, expected=1.0 if kind == "math" else 0.0)
    hung = row(r"\boxed{3}", label=hangs) if kind == "math" else row("hang", label=hangs)
    found = told(tmp_path, capsys, f'[reward]\nkind = "{kind}"\nkey = "{key}"\ntimeout_s = 2.0\nchildren = 1\n', wrong, hung)
    first, second = found["rows"]
    assert first["reward"] == wrong["expected"] and set(first["parts"]) >= {key} and second["reward"] is None
    assert found["summary"]["failed"] == 1 and found["summary"]["differ"] == 0
    main(["reward", str(tmp_path / "run.toml"), "--check", str(tmp_path / "rows.jsonl"), "--kind", "exact_match"])
    assert "0 failed" in capsys.readouterr().out, "the run's key is of the run's reward"
