"""The rollout bridge: an environment and a reward calculator of retrain's as the producer of a run.

```python
# agent.py, named in the run's TOML file as  producer.function = "agent.py:bridge"
from streamrl.bridges.retrain import create_retrain_bridge

bridge = create_retrain_bridge("maze.py:Maze", "maze.py:make_calculator")
```
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from streamrl.bridges.retrain.environments import EnvironmentBridge, OneTurn, Parser
from streamrl.bridges.retrain.rewards import Combine, RewardBridge
from streamrl.config.plugins import resolve
from streamrl.errors import ConfigError
from streamrl.producers.episode import Episode
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.schemas.tasks import RolloutTask

Made = str | Callable[..., Any] | None
"""A class or function that makes something, or the name of one: `file.py:name`, `pkg.mod:name`."""


class RetrainBridge:
    """A producer, in training and in evaluations alike: one call is one rollout of one task, whatever others do meanwhile."""

    def __init__(self, environment: EnvironmentBridge, rewards: RewardBridge | None) -> None:
        self._environment = environment
        self._rewards = rewards

    async def __call__(self, task: RolloutTask, engine: RolloutEngine) -> list[Episode]:
        """The samples of one episode, which share its reward; raises what the two bridges raise."""
        played = await self._environment.play(task, engine)
        episodes = [*played.episodes]
        rewards = None if self._rewards is None else await self._rewards.score(played.raw)
        first = 0
        for episode in episodes:
            turns = slice(first, first + len(episode.turns))
            told: dict[str, Any] = {"terminated": played.terminated, "turns": [turns.start, turns.stop]}
            if rewards is not None:
                told["rewards_per_turn"] = [*rewards.per_turn[turns]]
            episode.metadata = {"retrain": told}
            first = turns.stop
        if rewards is not None:
            episodes[-1].reward, episodes[-1].reward_parts = rewards.reward, rewards.parts
        return episodes


def create_retrain_bridge(
    environment: Made,
    reward_calculator: Made = None,
    *,
    environment_options: Mapping[str, Any] | None = None,
    reward_options: Mapping[str, Any] | None = None,
    parse: str | Parser | None = None,
    max_steps: int = 0,
    tools: Sequence[str] = (),
    show_tools: bool = True,
    checkpoint: bool = False,
    combine: Combine = "sum",
    reward_range: tuple[float, float] | None = None,
    use_run_reward: bool = False,
) -> RetrainBridge:
    """The producer of retrain's parts; nothing is made before the first rollout.

    Args:
        environment: makes an environment of retrain's, one for each episode that is played at the time; None: a row is one turn.
        reward_calculator: makes the calculator, once a process; None: the environment's rewards stand.
        environment_options: arguments by name of `environment`.
        reward_options: arguments by name of `reward_calculator`.
        parse: (turn, observation) -> LLMAction, or a part of its keys; None: by the chat template's format of tool calls.
        max_steps: turns of an episode; 0: the environment's `max_steps`, else 20.
        tools: names of tools that the environment must have; a rollout without one fails.
        show_tools: whether the chat template shows the environment's tools.
        checkpoint: keep the chat after each turn (`EnvironmentBridge`).
        combine: how the turns' rewards become one.
        reward_range: (low, high) that is put on [0, 1] (`RewardBridge`).
        use_run_reward: leave the reward to the run's section `reward`.

    Raises:
        ConfigError: something named is not there or cannot be called so, is an object in place of what makes it, or a value is none.
    """
    if environment is None and reward_calculator is None and not use_run_reward:
        raise ConfigError(
            "expected an environment, a reward calculator, or use_run_reward, got none of them: nobody would give a reward",
            hint="name what makes them, as in create_retrain_bridge('maze.py:Maze')",
        )
    if use_run_reward and (reward_calculator is not None or reward_range is not None):
        raise ConfigError(
            "expected no reward_calculator and no reward_range beside use_run_reward: the run's section `reward` decides alone",
            hint="leave one of them out",
        )
    if combine not in get_args(Combine):
        raise ConfigError(f"expected combine to be one of {', '.join(get_args(Combine))}, got {combine!r}", hint="correct it")
    bounds = None if reward_range is None else _bounds(reward_range)
    steps: Any = max_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigError(f"expected max_steps to be a whole number, 0 or more, got {max_steps!r}", hint="0 is the environment's own")
    names = (tools,) if isinstance(tools, str) else tuple(tools)
    made = OneTurn if environment is None else maker(environment, "environment", environment_options)
    calculator = None if reward_calculator is None else maker(reward_calculator, "reward_calculator", reward_options)
    parser: Any = resolve(parse, what="parser", key="parse") if isinstance(parse, str) else parse
    if parser is not None and (not callable(parser) or inspect.iscoroutinefunction(parser)):
        raise ConfigError(f"expected parse to be a plain function of (turn, observation), got {parser!r}", hint="correct parse")
    bridge = EnvironmentBridge(made, parse=parser, max_steps=max_steps, tools=names, show_tools=show_tools, checkpoint=checkpoint)
    return RetrainBridge(bridge, None if use_run_reward else RewardBridge(calculator, combine=combine, reward_range=bounds))


def maker(reference: str | Callable[..., Any], key: str, options: Mapping[str, Any] | None = None) -> Callable[[], Any]:
    """What `reference` names or is, to be called without arguments; raises ConfigError where it cannot be."""
    found: Any = resolve(reference, what=key.replace("_", " "), key=key) if isinstance(reference, str) else reference
    if not callable(found) or hasattr(type(found), "step") or hasattr(type(found), "process_rollouts"):
        raise ConfigError(
            f"expected {key} to be a class or a function that makes one, got a {type(found).__name__}",
            hint="each process makes its own, and an environment holds one conversation: give the class, or its name as file.py:Name",
            key=key,
        )
    given = dict(options or {})
    try:
        inspect.signature(found).bind(**given)
    except TypeError as error:
        said = f"with {', '.join(given)}" if given else "without arguments"
        raise ConfigError(
            f"expected {key} to be called {said}, got {getattr(found, '__name__', found)!s}{inspect.signature(found)}: {error}",
            hint=f"correct {key.removesuffix('_calculator')}_options",
            key=key,
        ) from error
    except ValueError:  # written in C: it does not say
        pass
    return functools.partial(found, **given)


def _bounds(given: Any) -> tuple[float, float]:
    numbers = (
        [value for value in given if isinstance(value, int | float) and not isinstance(value, bool)]
        if isinstance(given, list | tuple)
        else []
    )
    if len(numbers) != 2 or len(given) != 2 or not all(map(math.isfinite, numbers)) or numbers[0] >= numbers[1]:
        raise ConfigError(f"expected reward_range to be two finite numbers, the lower one first, got {given!r}", hint="as in (-1, 10)")
    return float(numbers[0]), float(numbers[1])
