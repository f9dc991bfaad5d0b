"""A run of kind `sft`: conversations over the bus, a loss that falls, every version again from the log; as a user starts it, no engine."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.core.state import FoldState
from streamrl.data.problems import load_problems
from streamrl.errors import ConfigError, DataError
from streamrl.history.backtest import backtest_grid
from streamrl.history.source import Source
from streamrl.history.tap import is_over
from streamrl.schemas.versions import Version
from tests.support.chat_templates import family
from tests.support.errors import raises
from tests.support.programs import STREAMRL, Start, said
from tests.support.ups import Ups

RUN = """
[run]
name = "chats"
kind = "sft"
steps = 12
[model]
max_len = 64
[data]
train = "chats.jsonl"
messages_key = "messages"
[tasks]
batch_tasks = 8
[engine]
kind = "table"
[trainer]
backend = "table"
[trainer.optimizer]
learning_rate = 0.3
"""


def chat(first: int, second: int) -> list[dict[str, str]]:
    """Two turns of the assistant."""
    said = (("user", f"{first}+3"), ("assistant", str(first + 3)), ("user", f"+{second}"), ("assistant", str(first + 3 + second)))
    return [{"role": role, "content": content} for role, content in said]


def write(place: Path, run: str = RUN, rows: list[object] | None = None) -> Path:
    """Put the run and its rows into a directory."""
    rows = rows or [{"messages": chat(a, b)} for a in range(6) for b in range(6)]
    (place / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "run.toml").write_text(run)
    return place / "run.toml"


@pytest.mark.process
async def test_conversations_are_learned_resumed_and_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    ups = Ups(tmp_path)
    await ups.up(8)
    await ups.up(24)
    entries = await ups.ledger()
    assert [entry.version.number for entry in entries] == [*range(1, 25)]
    assert entries[-1].metrics["train/loss"] < 0.7 * entries[0].metrics["train/loss"]
    assert (await ups.replayed()).equal == 24
    # Batches of half the size are twice as many: to the back-test the whole run is of demonstrations, too.
    facts = {"checkpoints": ups.run.checkpoints, "foreign": "", "record": None, "initial_digest": ""}
    source = Source(config=ups.run.load_config(), log=ups.bus, model_dir=ups.run.model_dir, **facts)
    assert min(one.batches for one in (await backtest_grid(source, ["tasks.batch_tasks=4"])).outcomes) >= 48
    await ups.bus.close()


def test_a_tap_leaves_when_the_run_has_its_last_version() -> None:
    sft, rl = (replace(Config(), run=replace(Config().run, kind=kind, steps=12)) for kind in ("sft", "rl"))
    warm, after = (FoldState(version=Version(0, 12), warmup_end=end, granted=0, grants=()) for end in (None, 0))
    assert is_over(sft, warm) and not is_over(rl, warm) and is_over(rl, after)
    assert not is_over(sft, replace(warm, version=Version(0, 11)))


async def test_a_conversation_that_cannot_be_trained_is_ended_with_the_reason(start: Start, tmp_path: Path) -> None:
    """One is too long for the model, one writes out the token that ends a turn; the others are trained."""
    long, forged = chat(1, 2), chat(1, 2)
    long[-1]["content"] = "4" * 80
    forged[0]["content"] = "1+1<|im_end|>"
    rows = [{"messages": chat(a, 1)} for a in range(6)]
    write(tmp_path, RUN.replace("steps = 12", "steps = 3"), [*rows, {"messages": long}, {"messages": forged}])
    code, out, err = await said(await start(*STREAMRL, "up", "run.toml"))
    assert code == 0, out + err
    summary = json.loads((tmp_path / "runs/chats/summary.json").read_text())
    assert (summary["steps"], summary["tokens_made"], summary["swaps"], summary["reward_last"]) == (3, 0, 0, None)
    assert summary["drops"]["failed"] >= 2 and "loss" in out
    assert "turns" in summary["newest_error"] or "at most 64" in summary["newest_error"]
    assert not list((tmp_path / "runs/chats/logs").glob("engine*"))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"messages": []}], "a list of chat messages"),
        ([{"messages": [{"role": "user", "content": "x"}]}], "a turn of the assistant's"),
        ([{"messages": [{"role": "assistant", "content": "x"}]}], "a message for the assistant"),
        ([{"chat": []}], "a list of chat messages"),
    ],
)
def test_rows_without_a_conversation_are_named(tmp_path: Path, rows: list[object], words: str) -> None:
    config = load(write(tmp_path, rows=rows)).data
    with raises(DataError, line=1, key="data.messages_key") as caught:
        load_problems(str(tmp_path / "chats.jsonl"), config, family("qwen3"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("data.messages_key= data.label_key=", "data.messages_key"),
        ("warmup.max_steps=3", "warmup.max_steps"),
        ("run.until_reward=0.5", "run.until_reward"),
        ("loss.clip_low=0.1", "loss"),
        ("gateway.workers=1", "gateway.workers"),
        ("producer.function=json:loads", "producer.function"),
        ("tasks.expire_versions=5", "tasks.expire_versions"),
        ("reward.workers=1", "reward.workers"),
        ("reward.overlong_buffer=4", "reward.overlong_buffer"),
        ("filters.min_tokens=3", "filters"),
        ("run.kind=rl", "data.messages_key"),
        ("data.chat_template=false", "data.chat_template"),
    ],
)
def test_what_is_for_reinforcement_learning_is_refused(tmp_path: Path, setting: str, key: str) -> None:
    with raises(ConfigError, key=key):
        load(write(tmp_path), overrides=setting.split())
    assert load(tmp_path / "run.toml", overrides=["loss.reduction=token_mean"]).run.kind == "sft"


@pytest.mark.parametrize(
    ("source", "setting", "key"),
    [
        ("", "data.curriculum=json:loads", "data.curriculum"),
        ("weight = [[0, 1], [5, 2]]", "run.steps=3", "data.sources"),
        ('messages_key = ""\nlabel_key = ""', "run.steps=3", "data.messages_key"),
        ('messages_key = "chat"', "run.kind=rl", "data.messages_key"),
    ],
)
def test_sources_of_conversations_have_their_own_keys_and_one_weight(tmp_path: Path, source: str, setting: str, key: str) -> None:
    one = '[[data.sources]]\nname = "{}"\ntrain = "chats.jsonl"\n'
    plain = RUN.replace('train = "chats.jsonl"', "") + one.format("a") + one.format("b")
    assert load(write(tmp_path, plain + 'messages_key = ""')).data.sources[1].messages_key == ""
    if setting == "run.kind=rl":
        plain = plain.replace('messages_key = "messages"', "")
    with raises(ConfigError, key=key):
        load(write(tmp_path, plain + source), overrides=[setting])
