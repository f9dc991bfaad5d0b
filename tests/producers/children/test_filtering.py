"""Filters of the user's: whatever they do, what they do not keep ends as a tombstone that says why, and nothing else passes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.errors import ConfigError, SchemaError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Scoring
from streamrl.producers.children.pool import Children
from streamrl.producers.filtering import KEEP, Filter, verdicts
from streamrl.producers.groups import GroupRunner
from streamrl.producers.single_turn import SingleTurn
from streamrl.rewards.built_in import ExactMatch
from streamrl.schemas.ledger import filter_reason
from tests.support.blocks import blocks
from tests.support.user_code import Workshop, ends

pytestmark = pytest.mark.process

SEEN = 'all(one.reward == 1.0 and one.completion == "7" for one in episodes) and task.label == "7"'
FILTERS = {
    "by_reward": 'return [(episode.reward > 2, "dull") for episode in episodes]',
    "odd": 'return [(episode.rollout % 2 == 0, "odd") if episode.rollout else True for episode in episodes]',
    "last": 'return [(episode.rollout != 2, "last") for episode in episodes]',
    "only_last": 'return [(episode.rollout == 2, "first") for episode in episodes]',
    "hangs": "while True: time.sleep(0.01)",
    "exits": "sys.exit(3)",
    "dies": "os._exit(7)",
    "raises": 'raise ValueError("no\\x00thing")',
    "forgets": "pass",
    "says": 'return "yes"',
    "not_a_number": 'return float("nan")',
    "short": "return [True]",
}
CODE = f"""
import sys, time, os

def nothing(task, episodes, least):
    assert {SEEN}
    return len(episodes) >= least

async def later(task, episodes):
    return False, "later\\n" + "x" * 1_000_000

def chosen(task, episodes):
    return globals()[task.metadata["filter"]](task, episodes, **task.metadata.get("options", {{}}))
""" + "".join(f"\ndef {name}(task, episodes):\n    {line}\n" for name, line in FILTERS.items())


def line_of(name: str) -> int:
    """The line in which a filter does what it does."""
    return CODE.splitlines().index(f"    {FILTERS[name]}") + 1


@contextlib.asynccontextmanager
async def filtered(workshop: Workshop, name: str, *, score_s: float = 20.0, **options: Any) -> AsyncGenerator[GroupRunner]:
    path = workshop.folder / "filters.py"
    path.write_text(CODE)
    told = {"function": f"{path}:{name}", "options": options}
    hello = Hello(
        function_key="filters.function",
        reward=KEEP,
        reward_options=told,
        model_dir=str(workshop.folder / "model"),
        max_len=128,
        chat_template=True,
        memory_bytes=0,
    )
    children = Children(hello, Limits(idle_s=20.0, total_s=60.0), scoring=Scoring(timeout_s=score_s, answer_s=1.0), count=1)
    runner = GroupRunner(
        producer=SingleTurn(),
        reward=ExactMatch(),
        engine=workshop.engine,
        tokenizer=workshop.tokenizer,
        options={},
        max_len=128,
        chat_template=True,
        filter=Filter(children, engine=workshop.engine, max_deaths=2),
    )
    try:
        await runner.start()
        yield runner
    finally:
        await runner.close()


async def test_what_is_kept_and_why_not(workshop: Workshop) -> None:
    """The greedy last rollout of a group stays as long as another one is kept, or it is kept itself."""
    async with filtered(workshop, "chosen") as runner:
        for name, options, greedy, expected in (
            ("by_reward", {}, False, dict.fromkeys(range(3), "filter: dull: ")),
            ("odd", {}, False, {0: "episode", 1: "filter: odd: ", 2: "episode"}),
            ("nothing", {"least": 3}, False, dict.fromkeys(range(3), "episode")),
            ("nothing", {"least": 4}, False, dict.fromkeys(range(3), "filter: ")),
            ("last", {}, True, dict.fromkeys(range(3), "episode")),
            ("odd", {}, True, {0: "episode", 1: "filter: odd: ", 2: "episode"}),
            ("by_reward", {}, True, dict.fromkeys(range(3), "filter: dull: ")),
            ("only_last", {}, True, {0: "filter: first: ", 1: "filter: first: ", 2: "episode"}),
            ("raises", {}, True, dict.fromkeys(range(3), f"failed: filter: ValueError: no\x00thing in filters.py:{line_of('raises')}")),
        ):
            task = workshop.task(metadata={"filter": name, "options": options})
            (group,) = await workshop.run(runner, replace(task, greedy_baseline=True) if greedy else task)
            assert ends(group) == expected, name


async def test_a_coroutine_may_filter_and_what_it_says_is_cut(workshop: Workshop) -> None:
    async with filtered(workshop, "later") as runner:
        (group,) = await workshop.run(runner, workshop.task())
    assert ends(group) == dict.fromkeys(range(3), f"filter: later {'x' * 54}: ")


async def test_what_is_no_verdict_is_a_failure_with_its_reason(workshop: Workshop) -> None:
    found = {}
    async with filtered(workshop, "chosen") as runner:
        for name in ("exits", "raises", "forgets", "says", "not_a_number", "short", "dies"):
            (group,) = await workshop.run(runner, workshop.task(metadata={"filter": name}))
            assert not group.episodes
            (found[name],) = {(failure.reason, failure.detail) for failure in group.failures}
    assert found["exits"] == ("failed", f"filter: SystemExit: 3 in filters.py:{line_of('exits')}")
    assert found["raises"][0] == "failed" and found["raises"][1].endswith(f"filters.py:{line_of('raises')}")
    for name, got in (("forgets", "got None"), ("says", "got 'yes'"), ("not_a_number", "got nan"), ("short", "got 1")):
        assert found[name][0] == "failed" and got in found[name][1]
    assert found["dies"][0] in ("deliveries", "failed") and "died" in found["dies"][1]


async def test_one_that_hangs_is_ended_and_never_a_pass(workshop: Workshop) -> None:
    async with filtered(workshop, "hangs", score_s=0.5) as runner:
        (group,) = await workshop.run(runner, workshop.task())
    assert not group.episodes and {failure.reason for failure in group.failures} == {"timeout"}
    assert all(failure.detail.startswith("filter:") and "filters.timeout_s" in failure.detail for failure in group.failures)


async def test_one_that_is_not_there_or_takes_other_arguments_is_said_at_the_start(workshop: Workshop) -> None:
    for name, options in (("gone", {}), ("nothing", {}), ("by_reward", {"least": 3})):
        with pytest.raises(ConfigError) as caught:
            async with filtered(workshop, name, **options):
                pass
        assert "filters.function" in caught.value.message


def test_verdicts() -> None:
    for given, expected in (
        (True, ["", ""]),
        (np.bool_(False), ["filter", "filter"]),
        ((False, "too dull"), ["filter: too dull"] * 2),
        ([True, (False, "x")], ["", "filter: x"]),
        ((True, "ignored"), ["", ""]),
    ):
        assert verdicts(given, 2) == expected


@pytest.mark.parametrize("given", [None, "yes", 1, 0, 1.0, float("nan"), (), (False,), (False, 3), [True], [True, None], (True, False), {}])
def test_what_is_no_verdict_decides_nothing(given: Any) -> None:
    with pytest.raises(SchemaError):
        verdicts(given, 2)


def test_a_reason_is_a_few_words_that_can_be_printed_and_none_of_ours() -> None:
    for said, reason in (
        ("", "filter"),
        ("filter", "filter"),
        ("filter: x", "filter: x"),
        ("stale", "filter: stale"),
        ("a\x00b\x1b[31m\n c\u202e", "filter: a b [31m c"),
        ("\ud800", "filter"),
        ("y" * 1_000_000, "filter: " + "y" * 60),
    ):
        assert filter_reason(said) == reason == filter_reason(reason)


def test_the_pages_filter() -> None:
    (block,) = [one for one in blocks(Path(__file__).parents[3] / "docs" / "algorithms.md") if "def keep(" in one.text]
    names: dict[str, Any] = {}
    exec(block.text, names)

    def asked(*completions: str) -> list[str]:
        return verdicts(names["keep"](None, [SimpleNamespace(completion=one) for one in completions]), len(completions))

    assert asked("a", "a") == ["filter: all the same"] * 2
    assert asked("a", "b" * 4000) == ["", "filter: rambles"]


def test_the_file_is_part_of_what_a_run_is_made_of(tmp_path: Path) -> None:
    from streamrl.config.code import rollout_code
    from streamrl.config.load import convert
    from streamrl.config.paths import resolve
    from streamrl.config.secret_options import with_secrets, without_secrets

    tree = resolve({"filters": {"function": "mine.py:keep", "options": {"api_key": "k", "least": 1}}}, tmp_path)
    config = convert(tree, where="run.toml")
    assert rollout_code(config)["filters.function"] == f"{tmp_path}/mine.py:keep"
    open_config, secrets = without_secrets(config)
    assert open_config.filters.options == {"least": 1} and secrets == {"filters": {"api_key": "k"}}
    assert with_secrets(open_config, secrets).filters.options == config.filters.options
