"""The environment bridge: an environment of retrain's plays an episode with the model as an independent rollout.

```text
reset(seed, options) -> conversation -> turn -> action -> step(action) -> conversation -> turn ... terminated, truncated, or max_steps
```
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from streamrl.bridges.retrain.conversations import Conversation, model_segments, opening
from streamrl.bridges.retrain.formats import (
    EnvironmentObservation,
    LLMAction,
    RawRolloutData,
    Step,
    action_of,
    checked_action,
    checked_reset,
    checked_step,
)
from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.turns import Turn
from streamrl.schemas.samples import Status
from streamrl.schemas.tasks import RolloutTask

DEFAULT_STEPS = 20
"""Turns of an episode whose environment has no `max_steps`; retrain's own."""
_SEEDS = 1 << 32
"""A seed is taken modulo this: what numpy's generators of old take."""
Parser = Callable[[Turn, EnvironmentObservation], Any]
"""Makes an action of a turn, with what the environment had shown before it."""


class Played(msgspec.Struct, frozen=True):
    """An episode that is over."""

    raw: RawRolloutData
    episodes: tuple[Episode, ...]
    """The same as samples, without a reward; the last one ends with the last turn."""
    terminated: bool


class OneTurn:
    """The environment of a run that has none: the prompt, one turn, and no reward of its own."""

    def __init__(self) -> None:
        self._conversation: list[dict[str, Any]] = []

    async def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """As retrain's `Environment.reset`."""
        self._conversation = [{"role": "user", "content": (options or {})["initial_prompt"]}]
        return self._observation("initial", True), {}

    async def step(self, action: LLMAction) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """As retrain's `Environment.step`."""
        self._conversation.append({"role": "assistant", "content": action["raw_llm_output"]})
        return self._observation("final_answer_feedback", False), 0.0, True, False, {}

    def _observation(self, kind: str, requires: bool) -> dict[str, Any]:
        return {
            "observation_type": kind,
            "content": None,
            "tool_result": None,
            "current_conversation": [*self._conversation],
            "available_tools": [],
            "requires_llm_action": requires,
        }


class EnvironmentBridge:
    """Plays episodes, each in an environment that no other has at the time.

    An environment that has ended an episode plays the next one after a `reset`; one that has raised is closed.

    Args:
        make: makes an environment, or awaits one; `setup` is then awaited where there is one.
        parse: makes an action of a turn; None: by the chat template's format of tool calls.
        max_steps: turns of an episode; 0: the environment's own `max_steps`, else 20.
        tools: names of tools that every environment must have.
        show_tools: whether the chat template shows the tools that an environment has.
        checkpoint: keep the chat after each turn, so that another process goes on with the episode; for environments that are a function
            of seed and actions, for the actions are given to a new one again.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        parse: Parser | None = None,
        max_steps: int = 0,
        tools: Sequence[str] = (),
        show_tools: bool = True,
        checkpoint: bool = False,
    ) -> None:
        self._make = make
        self._parse = parse
        self._max_steps = max_steps
        self._tools = tuple(tools)
        self._show_tools = show_tools
        self._checkpoint = checkpoint
        self._free: list[Any] = []

    async def play(self, task: RolloutTask, engine: RolloutEngine) -> Played:
        """One episode.

        Raises:
            SchemaError: the environment gave something else than retrain's interface says, or lacks a tool.
            EngineError: the engine went away; the rollout is then repeated.
            Exception: what the environment raised, as it is.
        """
        environment = self._free.pop() if self._free else await self._made()
        try:
            played = await self._episode(environment, task, engine)
        except BaseException:
            await _close(environment, engine)
            raise
        self._free.append(environment)
        return played

    async def _made(self) -> Any:
        environment = await given(self._make())
        if missing := [name for name in ("reset", "step") if not callable(getattr(environment, name, None))]:
            raise SchemaError(f"expected an environment with reset and step, got a {type(environment).__name__} without {missing[0]}")
        if callable(setup := getattr(environment, "setup", None)):
            await given(setup())
        return environment

    async def _episode(self, environment: Any, task: RolloutTask, engine: RolloutEngine) -> Played:
        options = {"initial_prompt": _initial_prompt(task), **task.metadata.get("reset", {})}
        observation = checked_reset(await given(environment.reset(seed=engine.context.seed % _SEEDS, options=options)))
        self._check_tools(observation)
        shown = [_definition(tool) for tool in observation["available_tools"]] if self._show_tools else []
        talk = Conversation(task, engine, observation["current_conversation"], shown)
        actions: list[LLMAction] = []
        steps: list[Step] = []
        saves, limit = self._checkpoint, self._limit(environment)
        while len(steps) < limit and not (steps and (steps[-1].terminated or steps[-1].truncated)):
            if steps:
                _check_wants_more(observation, len(steps) - 1)
                talk.hear(observation["current_conversation"])
            turn = await talk.turn()
            if not turn.token_ids:  # the longest sequence is reached
                break
            saves = saves and await _saved(talk, engine)
            action = action_of(turn) if self._parse is None else checked_action(self._parse(turn, observation), turn)
            actions.append(action)
            step = checked_step(await given(environment.step(action)), len(steps))
            steps.append(step._replace(info=_told(step.info, task, turn, action, observation)))
            observation = step.observation
        return _played(task, engine, talk, actions, steps, observation)

    def _limit(self, environment: Any) -> int:
        own = getattr(environment, "max_steps", DEFAULT_STEPS)
        limit = self._max_steps or own
        if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
            raise SchemaError(f"expected max_steps of {type(environment).__name__} to be a whole number of at least 1, got {limit!r}")
        return limit

    def _check_tools(self, observation: EnvironmentObservation) -> None:
        there = [str(tool_name(tool)) for tool in observation["available_tools"]]
        if missing := [name for name in self._tools if name not in there]:
            raise SchemaError(
                f"expected the environment to have the tools {', '.join(self._tools)}, it lacks {', '.join(missing)}",
                hint=f"it has {', '.join(there) or 'none'}: correct the names, or how the environment is made",
            )


async def given(value: Any) -> Any:
    """What a plain method gave, or an `async` one will give."""
    return await value if inspect.isawaitable(value) else value


def tool_name(tool: Mapping[str, Any]) -> str:
    """Of an entry of `available_tools`, in retrain's form or OpenAI's; raises SchemaError."""
    function = tool.get("function")
    name = (function if isinstance(function, Mapping) else tool).get("name")
    if not isinstance(name, str) or not name:
        raise SchemaError(f"expected every entry of available_tools to have a name, got {str(dict(tool))[:200]}")
    return name


def _definition(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool for chat templates, in OpenAI's form."""
    if isinstance(tool.get("function"), Mapping):
        return dict(tool)
    named = (tool.get(key) for key in ("parameters", "input_schema", "inputSchema"))
    parameters = next((found for found in named if isinstance(found, Mapping)), {"type": "object", "properties": {}})
    described = {"description": str(tool["description"])} if "description" in tool else {}
    return {"type": "function", "function": {"name": tool_name(tool), **described, "parameters": dict(parameters)}}


def _initial_prompt(task: RolloutTask) -> str:
    messages = opening(task)
    if len(messages) != 1 or messages[0].get("role") != "user" or not isinstance(messages[0].get("content"), str):
        roles = ", ".join(str(message.get("role")) for message in messages)
        raise SchemaError(
            f"expected a row's prompt to be a text or one user message, which the environment's reset gets, got messages of {roles}",
            hint="what else the model is to read comes from the environment",
        )
    return messages[0]["content"]


def _told(info: dict[str, Any], task: RolloutTask, turn: Turn, action: LLMAction, observation: EnvironmentObservation) -> dict[str, Any]:
    """A step's info with what its rewards may need: the row's label, and what was odd about the turn."""
    told = {"expected_answer": task.label, **info} if task.label is not None else info
    if len(turn.tool_calls) > 1:
        told = {**told, "further_tool_calls": len(turn.tool_calls) - 1}
    call = action["tool_call"] if action["action_type"] == "tool_call" else None
    if call and call["tool_name"] not in {tool_name(tool) for tool in observation["available_tools"]}:
        told = {**told, "unknown_tool": call["tool_name"]}
    return told


def _check_wants_more(observation: EnvironmentObservation, turn: int) -> None:
    if not observation["requires_llm_action"]:
        raise SchemaError(
            f"the environment's step {turn} neither ended the episode nor requires an action",
            hint="set terminated or truncated, or requires_llm_action",
        )


async def _saved(talk: Conversation, engine: RolloutEngine) -> bool:
    """Save; false where the episode has grown too large for it, which is said once."""
    try:
        await talk.save()
    except SchemaError as error:
        engine.log.warning("event=checkpoint_too_large error=%s", error.message)
        return False
    return True


async def _close(environment: Any, engine: RolloutEngine) -> None:
    try:
        await given(environment.close() if callable(getattr(environment, "close", None)) else None)
    except Exception as error:  # the episode has failed already, and its error is the one to tell
        engine.log.warning("event=close_failed error=%s", type(error).__name__, exc_info=error)


def _played(
    task: RolloutTask,
    engine: RolloutEngine,
    talk: Conversation,
    actions: Sequence[LLMAction],
    steps: Sequence[Step],
    observation: EnvironmentObservation,
) -> Played:
    episodes = talk.episodes()
    terminated = bool(steps) and steps[-1].terminated
    if not terminated and episodes[-1].status is Status.COMPLETED:
        episodes[-1].status = Status.TRUNCATED
    segments = model_segments(episodes)
    for action, segment in zip(actions, segments, strict=True):
        action["old_per_token_logps"] = np.array(segment.logprobs, np.float32)
    raw = RawRolloutData(
        full_conversation_history=observation["current_conversation"],
        executed_llm_actions=actions,
        intrinsic_rewards_per_turn=[step.reward for step in steps],
        final_environment_observation=observation,
        step_info_dicts_per_turn=[step.info for step in steps],
        rollout_metadata={
            "task": task.index,
            "rollout": engine.context.rollout_index,
            "step_count": len(steps),
            "terminated": terminated,
            "truncated": not terminated,
            "token_ids_per_turn": [[int(token) for token in segment.token_ids] for segment in segments],
        },
    )
    return Played(raw, tuple(episodes), terminated)
