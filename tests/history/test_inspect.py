"""`streamrl inspect`: stored samples as text and scored again, on recordings of today and of an earlier build."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.config.tree import Config, DataConfig, RewardConfig
from streamrl.data.tokenizer import load_tokenizer
from streamrl.history.inspect_again import episode_of, score_again
from streamrl.history.inspect_samples import group_text, sample_text, show
from streamrl.history.record_log import RecordedLog
from streamrl.history.trace import WIDTH, printable
from streamrl.producers.episode import samples_of
from streamrl.schemas.samples import TurnSpan, VersionSpan
from streamrl.schemas.tasks import RewardSpec, RolloutTask
from streamrl.schemas.versions import Version
from tests.support import recorded as runs
from tests.support.golden_rows import former_samples
from tests.support.printed import Printed
from tests.support.recorded_run import Recorded

Say = Callable[..., Printed]
VERB = "inspect"


def a_trained_task(recorded: Recorded) -> int:
    """The last one of the newest entry."""
    return recorded.ledger[-1].used[-1].task


def test_a_group_side_by_side_and_one_of_it(recorded: Recorded, said: Say) -> None:
    task = a_trained_task(recorded)
    out, err = said(recorded.path, task)
    assert err == "" and out.startswith(f"task {task}: 3 samples of 3 rollouts\nprompt  ")
    assert out.count("trained") == 3 and max(map(len, out.splitlines())) <= WIDTH
    shown = json.loads(said(recorded.path, task, "--json", "--tokens").out)
    tokenizer = load_tokenizer(RecordedLog(recorded.path).model_dir)
    for one in shown:
        ids = [token["id"] for token in one["tokens"]]
        assert tokenizer.decode(ids) == one["prompt"] + one["answer"] and len(ids) == one["num_tokens"]
        assert sum(token["trained"] for token in one["tokens"]) == one["num_trained"] > 0
        assert all((token["version"] is None) == (token["logprob"] is None) for token in one["tokens"])
    out, _ = said(recorded.path, f"{task}/1", "--tokens")
    assert "LOG-PROB" in out and max(map(len, out.splitlines())) <= WIDTH
    [row] = [one for one in shown if one["rollout"] == 1]
    assert f"{row['tokens'][-1]['logprob']:.6f}" in out


@pytest.mark.parametrize("name", ["fork", "late"])
def test_samples_of_an_earlier_build(name: str, tmp_path: Path, said: Say) -> None:
    runs.unpack(name, tmp_path)
    rows = runs.ledger(tmp_path / runs.RECORDING)
    path = tmp_path / runs.RECORDING
    assert said(path, 5).err == ""
    out, err = said(path, "--sequence", 2)
    assert err == "" and "VERSION  MASK" in out and rows


def test_a_message_by_its_sequence(recorded: Recorded, said: Say) -> None:
    sequence = recorded.ledger[-1].used[-1].sequences[-1]
    out, err = said(recorded.path, "--sequence", sequence)
    assert err == "" and f"message {sequence}" in out
    last = recorded.messages[-1][0]
    assert f"it has 1 to {last}, got {last + 1}" in said(recorded.path, "--sequence", last + 1, code=1).err
    assert "got 0" in said(recorded.path, "--sequence", 0, code=1).err
    poison = next(number for number, _, body, _ in recorded.messages if body == b"no Arrow data")
    assert "expected an Arrow stream" in said(recorded.path, "--sequence", poison, code=1).err


@pytest.mark.process
def test_the_reward_again(recorded: Recorded, said: Say) -> None:
    """The run's own gives what is stored; the recording's code is not run before somebody says so."""
    task = a_trained_task(recorded)
    err = said(recorded.path, task, "--reward", code=1).err
    assert "reward.kind = " in err and "--trust-code" in err
    again = json.loads(said(recorded.path, task, "--reward", "--trust-code", "--json").out)
    assert again["note"] == "" and len(again["samples"]) == 3
    for one in again["samples"]:
        assert (one["now"], one["now_parts"], one["error"]) == (one["stored"], one["stored_parts"], "")


@pytest.mark.process
def test_another_reward(recorded: Recorded, said: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sees the episode and the task as a producer's does; what it breaks is said, and breaks nothing else."""
    task = a_trained_task(recorded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.py").write_text(
        "import os\n\n\n"
        "def number(task, episode):\n"
        "    if episode.rollout == 1:\n"
        "        raise ValueError('not this one')\n"
        "    assert task.prompt and task.num_rollouts == 3 and episode.completion == episode.turns[-1]\n"
        "    return {'tokens': episode.num_tokens, 'label': len(str(task.label))}\n\n\n"
        "def dies(task, episode):\n"
        "    os._exit(3)\n"
    )
    again = json.loads(said(recorded.path, task, "--reward", "other.py:number", "--json").out)
    shown = json.loads(said(recorded.path, task, "--json").out)
    values = {one["rollout"]: one for one in again["samples"]}
    assert "not this one" in values[1]["error"] and values[1]["now"] is None
    for one in shown:
        if one["rollout"] != 1:
            assert values[one["rollout"]]["now"] == one["num_tokens"] + len(str(one["label"]))
            assert values[one["rollout"]]["stored"] == one["reward"]
    assert "exit code 3" in said(recorded.path, task, "--reward", "other.py:dies").out
    assert "'nothing'" in said(recorded.path, task, "--reward", "other.py:nothing", code=1).err
    assert "there is none" in said(recorded.path, task, "--reward", "missing.py:f", code=1).err


@pytest.mark.process
async def test_a_reward_that_is_named_is_asked_whatever_the_row_names(recorded: Recorded) -> None:
    """`f1`, which the row names, has parts; `exact_match` has none."""
    log = RecordedLog(recorded.path)
    tokenizer = load_tokenizer(log.model_dir)
    [given] = former_samples()[:1]
    config = Config(data=DataConfig(train="rows.jsonl", reward_key="r"))
    task = RolloutTask(run="a", index=0, source="main", label=tokenizer.decode(given.tokens.tolist()), reward=RewardSpec("f1"))
    source = cast(Any, SimpleNamespace(config=config, model_dir=log.model_dir))
    exact = RewardConfig(kind="exact_match")
    [by_row] = await score_again(source, exact, [given], task, tokenizer, by_row=True)
    [named] = await score_again(source, exact, [given], task, tokenizer, by_row=False)
    assert "precision" in by_row.now_parts and not named.now_parts and not named.error


def test_a_run_without_rewards_or_tokenizer_is_refused(tmp_path: Path, said: Say, recorded: Recorded) -> None:
    runs.unpack("late", tmp_path)
    assert "reward.kind = 'late'" in said(tmp_path / runs.RECORDING, "--sequence", 2, "--reward", code=1).err
    shutil.copytree(recorded.path, tmp_path / "copy", symlinks=True)
    recording = tmp_path / "copy" / "recording.json"
    facts = json.loads(recording.read_text())
    facts["model"] = str(tmp_path / "nowhere")
    recording.write_text(json.dumps(facts))
    err = said(tmp_path / "copy", a_trained_task(recorded), code=1).err
    assert "tokenizer" in err and str(tmp_path / "nowhere") in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "got none of them"),
        (["3", "--sequence", "3"], "got TASK and --sequence"),
        (["--prompt", "x", "--row", "1"], "got --prompt and --row"),
        (["--prompt", "x", "--tokens"], "for stored samples"),
        (["garbage"], "expected TASK or TASK/ROLLOUT"),
        (["99999"], "have been issued, got 99999"),
        (["41/77"], "expected a rollout from 0 to 2 of task 41, got 77"),
        (["--prompt", "1+1="], "got a recording, which has no engines"),
    ],
)
def test_what_cannot_be_shown_is_refused(recorded: Recorded, said: Say, arguments: list[str], expected: str) -> None:
    out, err = said(recorded.path, *arguments, code=1)
    assert out == "" and expected in err and "hint:" in err


def test_text_that_moves_the_cursor_is_escaped_and_counts_are_shown() -> None:
    full = former_samples()[0]
    one = show(full, 7, lambda ids: "\x1b[31mred\x07\n\u202eline " * len(ids))
    for text in (sample_text(one), group_text([one, one])):
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and "\\x1b[31mred" in text
        assert max(map(len, text.splitlines())) <= WIDTH
    assert printable("a\nb") == "a\\nb" and printable("a\nb", lines=True) == "a\nb"
    counted = replace(former_samples()[0], counters={"cached_tokens": 64.0, "spec_num_proposed_drafts": 12.0})
    one = show(counted, 7, lambda ids: "x" * len(ids))
    assert "\n  engine: cached_tokens 64, spec_num_proposed_drafts 12\n" in sample_text(one)
    assert "engine:" not in sample_text(show(replace(counted, counters={}), 7, lambda ids: "x" * len(ids)))


def test_an_episode_put_together_again_gives_the_same_sample(recorded: Recorded) -> None:
    """Segments, turns and versions of a rollout of two turns, one of which two versions sampled."""
    tokenizer = load_tokenizer(RecordedLog(recorded.path).model_dir)
    end = tokenizer.stop_ids[0]
    spans = (
        VersionSpan(2, None),
        VersionSpan(1, Version(0, 3)),
        VersionSpan(2, Version(0, 4)),
        VersionSpan(1, None),
        VersionSpan(1, Version(0, 4)),
    )
    sample = replace(
        former_samples()[0],
        tokens=np.array([5, 6, 7, 8, end, 9, 10], np.int32),
        loss_mask=np.array([0, 0, 1, 1, 1, 0, 1], np.uint8),
        logprobs=np.array([0, 0, -0.5, -1.25, -1.0, 0, -2.0], np.float32),
        spans=spans,
        turns=(TurnSpan(start=2, length=3), TurnSpan(start=6, length=1)),
    )
    task = RolloutTask(run="golden", index=41, source="main", data_epoch=2, num_rollouts=3, label=sample.label)
    episode = episode_of(sample, task, tokenizer)
    assert episode.turns == (tokenizer.decode([7, 8]), tokenizer.decode([10]))
    [again] = samples_of(task, [episode], producer="p")
    for name in ("tokens", "loss_mask", "logprobs"):
        assert np.array_equal(getattr(again, name), getattr(sample, name))
    assert (again.spans, again.metadata, again.label) == (spans, sample.metadata, sample.label)
