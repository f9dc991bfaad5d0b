"""The agents and rewards of docs/agents.md, each in a run of its own: they train, and do what the page says of them."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from streamrl import Episode, RolloutTask
from streamrl.bus.memory import MemoryBus
from streamrl.config.load import load
from streamrl.config.tree import OptimizerConfig
from streamrl.data.model import ensure_model
from streamrl.launch.prepare import prepare
from streamrl.producers.chat import Chat
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.turns import Turn
from streamrl.runtime.run_record import write_or_check
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.samples import Sample, Status
from streamrl.schemas.subjects import kind_of
from tests.support.blocks import blocks
from tests.support.chat_templates import family
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.scripted import rollout_engine
from tests.support.world.world import table_config

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
pytestmark = pytest.mark.process
CODE = [block for block in blocks(PAGE) if block.language == "python"]


COOL = """
async def cool(task, engine):
    chat = engine.chat(task)
    await chat.generate(max_new_tokens=2)
    chat.user("1")
    await chat.generate(max_new_tokens=2, temperature=0.25)
    return chat.episode(reward=float(sum(chat.token_ids) % 3))
"""


EACH = ("agent", "two_chats", "team", "explorer", "patient")
"""Agents of the page that await: each has every fifth task of one run."""
BY_TASK = f"""
async def each(task, engine):
    return await ({", ".join(EACH)})[task.index % {len(EACH)}](task, engine)
"""


def of(agent: str, samples: list[Sample]) -> list[Sample]:
    found = [sample for sample in samples if sample.task % len(EACH) == EACH.index(agent)]
    assert found, agent
    return found


def rollouts(samples: list[Sample]) -> list[list[Sample]]:
    """The samples of each rollout, in the order in which they were published."""
    found: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.task, sample.rollout), []).append(sample)
    return list(found.values())


async def trained(place: Path, **sections: Any) -> list[Sample]:
    """The samples of a run of two batches with the page's functions."""
    return (await ran(place, **sections))[0]


async def ran(place: Path, **sections: Any) -> tuple[list[Sample], list[LedgerEntry]]:
    """The samples and the ledger of a run with the page's functions."""
    code = place / "agent.py"
    code.write_text("\n".join(block.text for block in CODE) + BY_TASK)
    named = {
        section: {
            **{key: value if ":" in value else f"{code}:{value}" for key, value in keys.items() if isinstance(value, str)},
            **{key: value for key, value in keys.items() if not isinstance(value, str)},
        }
        for section, keys in sections.items()
    }
    given: dict[str, Any] = {"run": {"name": "agents", "steps": 2}, "reward": {"kind": f"{code}:score"}, "model": {"max_len": 200}} | named
    given["tasks"] = {"drop_zero_variance": False, "batch_tasks": 2, **given.get("tasks", {})}
    run, config = make_run(place, table_config(place, **given))
    ensure_model(config, run.model_dir)
    bus = MemoryBus(config.run.name, config.bus)
    try:
        await write_or_check(bus, await prepare(config, run))
        await run_to_end(config, run, bus)
        entries = await read_ledger(bus, config.run.name)
        assert len(entries) == config.run.steps
        last, found = (await bus.state("samples")).last, list[Sample]()
        async for message in bus.read("samples", after=0):
            if kind_of(message.subject) == "samples":
                found += decode_samples(message.body).rows()
            if message.sequence == last:
                return found, entries
        raise AssertionError
    finally:
        await bus.close()


def test_the_page_has_no_other_blocks_and_its_states_and_fields() -> None:
    assert [block.language for block in blocks(PAGE) if block not in CODE] == ["toml", "bash", "bash"]
    names = re.findall(r"^(?:async def|def|class) (\w+)", "\n".join(block.text for block in CODE), flags=re.MULTILINE)
    agents = ["agent", "plain", "two_chats", "team", "search", "clock", "tool_user", "explorer", "patient"]
    assert names == [*agents, "score", "graded", "Shortest"], "each has a test below"
    page = PAGE.read_text()
    assert all(f"`{status.name}`" in page for status in Status)
    assert all(f"`{field}`" in page for field in Turn.__struct_fields__)


async def test_the_file_of_the_page_loads(tmp_path: Path) -> None:
    [toml] = [block for block in blocks(PAGE) if block.language == "toml"]
    (tmp_path / "agent.py").write_text("\n".join(block.text for block in CODE))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "my.toml").write_text(f'[data]\ntrain = "rows.jsonl"\n{toml.text}')
    config = load(tmp_path / "my.toml")
    assert (config.producer.function, config.reward.kind) == (f"{tmp_path}/agent.py:agent", f"{tmp_path}/agent.py:score")


async def test_agents_of_the_page_train_as_it_says(tmp_path: Path) -> None:
    samples = await trained(tmp_path, producer={"function": "each"}, tasks={"batch_tasks": len(EACH)})
    assert all(sample.reward in (0.0, 1.0) for sample in of("agent", samples))
    for first, last in rollouts(of("two_chats", samples)):
        assert (first.sampling.temperature, last.sampling.temperature) == (1.0, 0.5)
        assert list(last.tokens[: len(first.tokens)]) == list(first.tokens) and not any(last.loss_mask[: len(first.tokens)])
        assert last.metadata["turns"] == 2
    for first, second, judge in rollouts(of("team", samples)):
        assert (first.agent, second.agent, judge.agent) == ("solver/0", "solver/1", "")
        assert {first.reward, second.reward} == {judge.reward} and judge.agent_reward is None
        for solver in (first, second):
            assert solver.agent_reward in (0.0, 1.0)
    explored = of("explorer", samples)
    branches = [sample for sample in explored if sample.branch is not None]
    assert len(branches) == len(explored) * 2 // 3
    for sample in branches:
        assert sample.branch is not None and not any(sample.loss_mask[: sample.branch.num_shared])
    saved = of("patient", samples)
    assert {sample.reward for sample in saved} == {1.0}
    several = [[turn.sampling for turn in sample.turns] for sample in saved if sample.turns]
    assert several and all(turns == [{}, *[{"temperature": 0.5}] * (len(turns) - 1)] for turns in several)


@pytest.mark.parametrize("name", ["each", "plain"])
async def test_agents_whose_chats_are_full_end(tmp_path: Path, name: str) -> None:
    """`plain` blocks, and so has a run of its own."""
    samples = await trained(tmp_path, producer={"function": name}, model={"max_len": 14}, tasks={"batch_tasks": len(EACH)})
    assert all(len(sample.tokens) <= 14 for sample in samples)
    if name == "plain":
        assert samples and all(sample.reward in (0.0, 1.0) for sample in samples)
        return
    assert all(of(one, samples) for one in EACH)
    for one in ("two_chats", "explorer", "patient"):
        assert any(sample.status is Status.TRUNCATED for sample in of(one, samples)), one


async def test_tools_of_the_page() -> None:
    """The digit model cannot write a call, so a script does."""
    space: dict[str, Any] = {}
    exec("\n".join(block.text for block in CODE), space)
    calls = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call><tool_call>{"name": "clock"}</tool_call>'
    engine = rollout_engine(family("qwen3"), [calls, '<tool_call>{"name": "look"}</tool_call>', "Done."])
    episode = await space["tool_user"](engine.context.task, engine)
    said = family("qwen3").decode([token for segment in episode.segments for token in segment.token_ids])
    assert "\n3 pages about x\n</tool_response>" in said and '{"time":' in said
    assert "'look'; there are: clock, search" in said and episode.completion == "Done."


async def test_turns_are_trained_at_the_temperature_they_were_drawn_at(tmp_path: Path) -> None:
    code = tmp_path / "cool.py"
    code.write_text(COOL)
    producer, tasks = {"function": f"{code}:cool"}, {"max_staleness": 0}
    # Behind the first step the model is no longer uniform, and a temperature changes every probability.
    samples, entries = await ran(tmp_path, producer=producer, tasks=tasks, trainer={"optimizer": OptimizerConfig(learning_rate=0.5)})
    assert {tuple(turn.sampling.get("temperature") for turn in sample.turns) for sample in samples} == {(None, 0.25)}
    distances = [entry.metrics["train/train_rollout_logprob_abs_diff_max"] for entry in entries]
    assert len(distances) == 2 and max(distances) < 1e-5, "in lockstep trainer and sampler have the same weights"


async def test_named_parts_and_options(tmp_path: Path) -> None:
    samples = await trained(tmp_path, reward={"kind": "graded", "options": {"bonus": 0.25}})
    assert {tuple(sample.reward_parts) for sample in samples} == {("right", "short")}
    assert all(sample.reward_parts["short"] == 0.25 and sample.reward == 0.25 + sample.reward_parts["right"] for sample in samples)


async def test_a_reward_that_compares_a_group(tmp_path: Path) -> None:
    samples = await trained(tmp_path, reward={"kind": "Shortest"})
    groups: dict[int, set[float | None]] = {}
    for sample in samples:
        groups.setdefault(sample.task, set()).add(sample.reward)
    assert groups and all(1.0 in rewards for rewards in groups.values())


@pytest.mark.parametrize(
    ("name", "kind"), [("task", RolloutTask), ("engine", RolloutEngine), ("chat", Chat), ("episode", Episode)], ids=lambda value: str(value)
)
def test_what_the_page_names_is_there_and_what_is_there_is_named(name: str, kind: type) -> None:
    page = PAGE.read_text()
    named = set(re.findall(rf"`(?:await )?{name}\.(\w+)", page))
    there = {word for word in dir(kind) if not word.startswith("_")} | (inspect_assigned(kind) if name in ("engine", "chat") else set())
    assert named - there == set()
    own = ("run", "source", "policy", "min_version", "min_epoch", "least", "seed", "refused", "image_blob", "image_rows")
    if name != "episode":  # of which a reward is shown a part
        assert there - named - {*(own if name == "task" else ())} == set()


def inspect_assigned(kind: type) -> set[str]:
    """Public attributes that `__init__` sets."""
    return {word for word in re.findall(r"self\.(\w+)(?:: [^=\n]+)? =", inspect.getsource(kind)) if not word.startswith("_")}
