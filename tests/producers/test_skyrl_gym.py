from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamrl.bridges.skyrl_gym import check
from streamrl.config.tree import ProducerConfig
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import ConfigError
from streamrl.producers.episode import Episode
from streamrl.producers.functions import make_producer
from streamrl.producers.protocol import Failure
from streamrl.schemas.samples import Status
from tests.support.errors import raises
from tests.support.rolling import PROMPT, context_of, task_of

ANSWERS = {(0, "<|assistant|>"): "?", (1, "?"): "!"}
ENV = """
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
import time

class Sum(BaseTextEnv):
    closed = 0

    def __init__(self, env_config, extras):
        super().__init__()
        self.wanted, self.mode = extras["reward_spec"]["ground_truth"], extras.get("mode", "")
        self.hint, self.max_turns = env_config.get("hint", "7"), extras.get("max_turns", 3)

    def init(self, prompt):
        return (prompt if self.mode != "opens" else [{"role": "user", "content": "7"}]), {}

    def step(self, action):
        self.turns += 1
        if self.mode == "crashes":
            raise RuntimeError("the game is broken")
        reward = {"nan": float("nan"), "none": None}.get(self.mode, float(action == self.wanted))
        done = action == self.wanted or self.turns >= self.max_turns
        silent = done or self.mode == "mute"
        said = [] if silent else [{"role": "user", "content": self.hint}]
        return BaseTextEnvStepOutput(observations=said, reward=reward, done=done, metadata={})

    def close(self):
        type(self).closed += 1

    def get_metrics(self):
        return {"turns_taken": self.turns}
"""


@pytest.fixture
def env(tmp_path: Path) -> str:
    (tmp_path / "my_env.py").write_text(ENV)
    return f"skyrl_gym:{tmp_path / 'my_env.py'}:Sum"


async def roll_out(
    engine: TableEngine, tokenizer: Tokenizer, env: str, *, label: str = "?!", options: dict[str, Any] | None = None, **metadata: Any
) -> Sequence[Episode | Failure]:
    task = task_of(tokenizer, label=label, metadata=metadata)
    return await make_producer(env).rollout(task, context_of(engine, tokenizer, task, options=options or {}))


async def test_an_environment_answers_turns_and_gives_the_reward(engine: TableEngine, tokenizer: Tokenizer, env: str) -> None:
    options = {"max_turns": 2, "env_config": {"hint": "9"}}
    [episode] = await roll_out(engine, tokenizer, env, label="never", options=options)
    assert isinstance(episode, Episode)
    assert tokenizer.decode([token for segment in episode.segments for token in segment.token_ids]) == (
        f"{PROMPT}?!<|end|><|user|>9<|end|><|assistant|>?!<|end|>"
    )
    assert (episode.reward, episode.turns) == (0.0, ("?!", "?!"))
    assert episode.metadata == {"skyrl_gym": {"steps": 2, "done": True, "turns_taken": 2}}


async def test_a_solved_task_is_over_and_an_environment_may_open_the_conversation(
    engine: TableEngine, tokenizer: Tokenizer, env: str
) -> None:
    [episode] = await roll_out(engine, tokenizer, env)
    assert isinstance(episode, Episode) and (episode.reward, len(episode.turns)) == (1.0, 1)
    assert episode.status is Status.COMPLETED
    [episode] = await roll_out(engine, tokenizer, env, mode="opens")
    assert isinstance(episode, Episode)
    assert tokenizer.decode(episode.segments[0].token_ids) == "<|user|>7<|end|><|assistant|>"
    [episode] = await roll_out(engine, tokenizer, "skyrl_gym:gsm8k", label="7")
    assert isinstance(episode, Episode) and (episode.reward, len(episode.turns)) == (0.0, 1)


@pytest.mark.parametrize(
    ("mode", "said"),
    [("crashes", "RuntimeError: the game is broken"), ("none", "expected a number as the reward"), ("mute", "messages of one role")],
)
async def test_what_an_environment_does_wrong_fails_its_rollout_and_says_so(
    engine: TableEngine, tokenizer: Tokenizer, env: str, mode: str, said: str
) -> None:
    [failure] = await roll_out(engine, tokenizer, env, label="never", mode=mode)
    assert isinstance(failure, Failure) and failure.reason == "failed" and said in failure.detail


def test_what_cannot_run_is_refused_before_the_start(env: str) -> None:
    check(env.removeprefix("skyrl_gym:"), ProducerConfig(options={"max_turns": 2, "env_config": {}}))
    with raises(ConfigError, key="producer.function"):
        check("gsm9k", ProducerConfig())
    with raises(ConfigError, key="producer.options"):
        check("gsm8k", ProducerConfig(options={"max_turn": 2}))
    with raises(ConfigError, key="producer.options"):
        check("gsm8k", ProducerConfig(options={"max_turns": "two"}))
    with raises(ConfigError, key="producer.function"):
        check(env.removeprefix("skyrl_gym:") + "s", ProducerConfig())
