"""SkyRL-gym environments: `producer.function = "skyrl_gym:gsm8k"`, or a class of yours, `skyrl_gym:my_env.py:MyEnv`.

```text
env.init(the row's prompt) -> turn -> env.step(its text) -> messages -> turn ... done, or no turn left
```

`extras` is the row's metadata, as SkyRL gives its row; a row that has no `reward_spec` there gets its label as `ground_truth`. The
model's tokens stay as they were sampled: a `postprocessed_action` of the environment's does not replace them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from streamrl.config.bridges import check_options
from streamrl.config.plugins import resolve
from streamrl.config.tree import ProducerConfig
from streamrl.errors import ConfigError
from streamrl.producers.blocking import BlockingEngine
from streamrl.producers.episode import Episode
from streamrl.schemas.tasks import RolloutTask

_OPTIONS = {"env_config": dict, "max_turns": int}
_MAX_TURNS = 32


def producer(name: str) -> Callable[[RolloutTask, BlockingEngine], Episode]:
    """The producer for the environment `name`; a plain function, for environments block."""
    make = _maker(name)

    def roll_out(task: RolloutTask, engine: BlockingEngine) -> Episode:
        extras: dict[str, Any] = {**task.metadata}
        if task.label is not None:
            extras.setdefault("reward_spec", {"method": "rule", "ground_truth": task.label})
        max_turns = engine.options.get("max_turns", 0)
        if max_turns:
            extras["max_turns"] = max_turns
        env = make(env_config=engine.options.get("env_config", {}), extras=extras)
        try:
            return _episode(env, task, engine, max_turns or _MAX_TURNS)
        finally:
            env.close()

    return roll_out


def check(name: str, section: ProducerConfig) -> None:
    """Raise ConfigError unless SkyRL-gym is installed, has the environment (or the class is there), and the options are known."""
    check_options(section.options, _OPTIONS)
    _maker(name)


def _maker(name: str) -> Callable[..., Any]:
    try:
        gym = importlib.import_module("skyrl_gym")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"producer.function = 'skyrl_gym:{name}': expected the package skyrl_gym, there is none",
            hint="pip install 'streamrl[skyrl-gym]'",
            key="producer.function",
        ) from error
    if ":" in name or "." in name:
        return resolve(name, what="SkyRL-gym environment", key="producer.function")
    registry: Mapping[str, Any] = importlib.import_module("skyrl_gym.envs.registration").registry
    if name not in registry:
        raise ConfigError(
            f"expected an environment of SkyRL-gym, got {name!r}",
            hint=f"there are {', '.join(sorted(registry))}; a class of yours is skyrl_gym:file.py:Name",
            key="producer.function",
        )
    return lambda **given: gym.make(name, **given)


def _episode(env: Any, task: RolloutTask, engine: BlockingEngine, max_turns: int) -> Episode:
    prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else [*task.prompt]
    messages, _ = env.init([*prompt])
    chat = engine.chat(task if messages == prompt else messages)
    rewards: list[float] = []
    done = False
    while not done and len(chat.turns) < max_turns:
        turn = chat.generate()
        if not turn.token_ids:  # the longest sequence is reached
            break
        step = env.step(turn.text)
        if step["reward"] is None:
            raise ValueError(f"expected a number as the reward of a step of {type(env).__name__}, got None")
        rewards.append(float(step["reward"]))
        done = bool(step["done"])
        if not done and len(chat.turns) < max_turns:
            role, text = _answer(step["observations"])
            (chat.tool if role == "tool" else chat.user)(text)
    return chat.episode(reward=sum(rewards), metadata={"skyrl_gym": {"steps": len(rewards), "done": done, **env.get_metrics()}})


def _answer(observations: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """Role and text of what an environment answers; several messages of one role are one."""
    roles = {message["role"] for message in observations}
    if len(roles) != 1:
        raise ValueError(f"expected messages of one role from the environment, got {sorted(roles) or 'none'}")
    return roles.pop(), "\n".join(message["content"] for message in observations)
