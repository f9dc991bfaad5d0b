"""docs/retrain.md: its example trains in a run, its table names what is known, and rows whose environment misbehaves end and say why."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.bridges.retrain import StreamrlTrainerAdapter, create_retrain_bridge, processed_trajectory
from streamrl.bridges.retrain.keys import ALIASES, KNOWN
from streamrl.bus.reading import stretch
from streamrl.data.tokenizer import load_tokenizer
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.samples import Sample, Tombstone
from streamrl.schemas.subjects import kind_of
from tests.support.blocks import blocks

PAGE = Path(__file__).parents[3] / "docs" / "retrain.md"
PARTS, AGENT, TRAIN = (block.text for block in blocks(PAGE) if block.language == "python")
MISBEHAVES = """
import asyncio, sys

class Odd(Sums):
    async def step(self, action):
        what = self.talk[0]["content"]
        if what == "1+1=":
            raise RuntimeError("the game is broken")
        if what == "1+2=":
            sys.exit(3)
        if what == "1+3=":
            await asyncio.sleep(3600)
        observation, reward, *rest = await super().step(action)
        return (observation, float("nan") if what == "2+1=" else reward, *rest)


class Picky(Right):
    def turn(self, raw, index):
        said = super().turn(raw, index)
        return {**said, "final_combined_reward": None} if raw["full_conversation_history"][0]["content"] == "2+2=" else said
"""


def trainer_of(place: Path, monkeypatch: pytest.MonkeyPatch, extra: dict[str, Any], **changed: Any) -> StreamrlTrainerAdapter:
    """The page's trainer, with `extra` hyperparameters and other arguments for `changed`."""
    monkeypatch.chdir(place)
    (place / "maze.py").write_text(PARTS + MISBEHAVES)

    def make(**given: Any) -> StreamrlTrainerAdapter:
        given["algorithm_config"]["hyperparameters"] |= extra
        return StreamrlTrainerAdapter(**{**given, "gpus": (), "directory": place / "out", "name": "sums", **changed})

    monkeypatch.setattr("streamrl.bridges.retrain.StreamrlTrainerAdapter", make)
    found: dict[str, Any] = {}
    exec(TRAIN, found)
    return found["trainer"]


async def records(trainer: StreamrlTrainerAdapter) -> tuple[list[Sample], list[Tombstone], RunDir]:
    """Samples and tombstones on the log of its run, which has ended."""
    run = RunDir.find(trainer.name, base=str(trainer.directory / "runs"))
    samples, tombstones = list[Sample](), list[Tombstone]()
    async with open_bus(run) as bus:
        state = await bus.state("samples")
        async for message in stretch(bus, "samples", first=state.first, last=state.last):
            if kind_of(message.subject) == "samples":
                samples += decode_samples(message.body).rows()
            elif kind_of(message.subject) == "tombstones":
                tombstones.append(decode(message.body, Tombstone, where=message.subject))
    return samples, tombstones, run


@pytest.mark.process
async def test_the_pages_example_trains_and_odd_rows_end_and_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"streamrl_producer.idle_timeout_s": 1.0, "streamrl_tasks.max_staleness": 2, "streamrl_page.enabled": False}
    trainer = trainer_of(tmp_path, monkeypatch, extra, environment="maze.py:Odd", reward_calculator="maze.py:Picky")
    summary = await trainer.train(3)
    assert (summary["rollouts_completed"], summary["final_rollout_id"]) == (3, 2)
    assert summary["drops"]["failed"] > 0 and summary["drops"]["timeout"] > 0

    samples, tombstones, run = await records(trainer)
    prompts = {row["prompt"]: row["label"] for row in map(json.loads, (trainer.directory / "prompts.jsonl").read_text().splitlines())}
    tokenizer = load_tokenizer(run.model_dir)
    assert samples
    for sample in samples:
        turns = processed_trajectory(sample, tokenizer)
        prompt = turns[0]["prompt_text"]
        right = prompts[prompt]
        # The game's rules, once more: 0.3 for asking first, and 1 for each turn that is the sum.
        asked = turns[0]["completion_text"] == "?"
        expected = [0.3 * (asked and index == 0) + (turn["completion_text"] == right) for index, turn in enumerate(turns)]
        assert len(turns) == 1 + asked and [turn["final_combined_reward"] for turn in turns] == pytest.approx(expected)
        assert sample.reward == pytest.approx(sum(expected))
        assert not asked or turns[1]["prompt_text"] == f"{prompt}?{right}"
    said = {row: [t for t in tombstones if t.detail and row in t.detail] for row in ("broken", "SystemExit", "nan", "got None")}
    assert all(said.values()), {t.detail for t in tombstones}
    assert {t.reason for t in tombstones if "timeout" in t.reason} == {"timeout"}
    assert not {"1+1=", "1+2=", "1+3=", "2+1=", "2+2="} & {processed_trajectory(sample, tokenizer)[0]["prompt_text"] for sample in samples}


def test_the_example_of_the_first_part_is_a_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "maze.py").write_text(PARTS)
    (tmp_path / "agent.py").write_text(AGENT)
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(AGENT, found)
    assert type(found["bridge"]) is type(create_retrain_bridge("maze.py:Sums", "maze.py:Right"))


def test_the_table_names_what_is_known() -> None:
    text = PAGE.read_text()
    table = text[text.index("| retrain, slime |") : text.index("Trainer and engines get")]
    said = set(re.findall(r"`([a-z0-9_]+)`", table))
    assert not {name for name in KNOWN if name not in said}
    ours = {"loss", "sampling", "data", "metrics"}
    assert not said - set(KNOWN) - set(ALIASES) - ours
