"""What retrain's parts hand each other, as typed dictionaries under its own names, and checks of what comes from its code.

The names and keys are those of `retrain.environment.types` and `retrain.reward.types` (github.com/teilomillet/retrain, 9d8ef25). There they
are annotations that nobody looks at; here each key that is read is checked, and what is wrong with it is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError
from streamrl.producers.turns import Turn

Message = Mapping[str, Any]
"""Of a conversation: `role` and `content`, both texts."""
_LONGEST = 200
"""Characters of a value in an error."""


class ToolCallAction(TypedDict):
    """A call of a tool."""

    tool_name: str
    tool_input: dict[str, Any] | None


class LLMAction(TypedDict):
    """What the model did in a turn."""

    action_type: Literal["text_response", "tool_call"]
    text: str | None
    tool_call: ToolCallAction | None
    raw_llm_output: str
    """The turn's text, without its stop token."""
    reasoning: str | None
    old_per_token_logps: npt.NDArray[np.float32] | None
    """[t] log-probs that the turn's tokens were drawn with, its stop token's included; None until the episode is over."""


class EnvironmentObservation(TypedDict):
    """What an environment shows."""

    observation_type: str
    content: Any
    tool_result: Mapping[str, Any] | None
    current_conversation: Sequence[Message]
    """All of it, the model's turns included."""
    available_tools: Sequence[Mapping[str, Any]]
    requires_llm_action: bool


class RawRolloutData(TypedDict):
    """An episode as a reward calculator gets it. The three lists have one entry a turn."""

    full_conversation_history: Sequence[Message]
    executed_llm_actions: Sequence[LLMAction]
    intrinsic_rewards_per_turn: Sequence[float]
    final_environment_observation: EnvironmentObservation
    step_info_dicts_per_turn: Sequence[dict[str, Any]]
    rollout_metadata: dict[str, Any]


class SingleTurnDataForTrainer(TypedDict):
    """A turn as a trainer gets it."""

    prompt_text: str
    completion_text: str
    final_combined_reward: float
    auxiliary_data: dict[str, Any]
    old_per_token_logps: npt.NDArray[np.float32] | None


ProcessedTrajectory = Sequence[SingleTurnDataForTrainer]


class Step(NamedTuple):
    """What `Environment.step` gave."""

    observation: EnvironmentObservation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


def action_of(turn: Turn) -> LLMAction:
    """A turn as the chat template's own format reads it: its first call of a tool, else a text."""
    call = turn.tool_calls[0] if turn.tool_calls else None
    return LLMAction(
        action_type="tool_call" if call else "text_response",
        text=turn.content,
        tool_call=ToolCallAction(tool_name=call.name, tool_input=call.arguments) if call else None,
        raw_llm_output=turn.text,
        reasoning=turn.reasoning or None,
        old_per_token_logps=None,
    )


def checked_action(given: Any, turn: Turn) -> LLMAction:
    """What a parser of the user's made of a turn, with the keys that it left out.

    Raises:
        SchemaError: no mapping, an unknown key or type of action, or a call without the name of a tool.
    """
    said = _mapping(given, "an action from the parser")
    if unknown := said.keys() - LLMAction.__annotations__.keys():
        raise SchemaError(
            f"expected the keys of an LLMAction from the parser, got {', '.join(sorted(map(str, unknown)))} besides",
            hint=f"they are {', '.join(LLMAction.__annotations__)}",
        )
    action: LLMAction = {**action_of(turn), **said}  # pyright: ignore[reportAssignmentType]
    if action["action_type"] not in ("text_response", "tool_call"):
        raise SchemaError(f"expected action_type 'text_response' or 'tool_call' from the parser, got {_short(action['action_type'])}")
    if action["action_type"] == "tool_call":
        call = _mapping(action["tool_call"], "tool_call of an action from the parser")
        if not isinstance(call.get("tool_name"), str):
            raise SchemaError(f"expected tool_call.tool_name of an action from the parser to be a text, got {_short(call)}")
    return action


def checked_reset(given: Any) -> EnvironmentObservation:
    """The observation of what `Environment.reset` gave; raises SchemaError."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise SchemaError(f"expected (observation, info) from the environment's reset, got {_short(given)}")
    observation = checked_observation(given[0], "reset")
    if not observation["current_conversation"]:
        raise SchemaError(
            "expected a conversation of at least one message from the environment's reset, got none",
            hint="it is what the model reads first; options['initial_prompt'] is the row's prompt",
        )
    if not observation["requires_llm_action"]:
        raise SchemaError("expected an observation that requires an action from the environment's reset, got one that does not")
    return observation


def checked_step(given: Any, turn: int) -> Step:
    """What `Environment.step` gave at a turn, from 0; raises SchemaError."""
    where = f"step {turn}"
    if not isinstance(given, tuple | list) or len(given) != 5:
        raise SchemaError(
            f"expected (observation, reward, terminated, truncated, info) from the environment's {where}, got {_short(given)}"
        )
    observation, reward, terminated, truncated, info = given
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool_):
            raise SchemaError(f"expected {name} of the environment's {where} to be true or false, got {_short(flag)}")
    return Step(
        checked_observation(observation, where),
        finite(reward, f"the reward of the environment's {where}"),
        bool(terminated),
        bool(truncated),
        dict(_mapping(info, f"info of the environment's {where}")),
    )


def checked_observation(given: Any, where: str) -> EnvironmentObservation:
    """An observation whose keys that are read here are there and of their types; raises SchemaError."""
    place = f"the observation of the environment's {where}"
    said = _mapping(given, place)
    if missing := [key for key in ("current_conversation", "available_tools", "requires_llm_action") if key not in said]:
        raise SchemaError(f"expected {', '.join(missing)} in {place}, got {', '.join(map(str, said)) or 'no key'}")
    conversation, tools = said["current_conversation"], said["available_tools"]
    if not isinstance(conversation, list | tuple) or not all(map(_is_message, conversation)):
        raise SchemaError(
            f"expected messages with role and content, both texts, as current_conversation in {place}, got {_short(conversation)}"
        )
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise SchemaError(f"expected a list of tables as available_tools in {place}, got {_short(tools)}")
    if not isinstance(said["requires_llm_action"], bool):
        raise SchemaError(f"expected requires_llm_action in {place} to be true or false, got {_short(said['requires_llm_action'])}")
    # A copy: an environment may go on writing to its own list.
    copied = {**said, "current_conversation": [dict(message) for message in conversation]}
    return copied  # pyright: ignore[reportReturnType]


def finite(value: Any, what: str) -> float:
    """A number that is neither a text nor true or false, and finite; raises SchemaError.

    Tensors and arrays of one element are numbers too.
    """
    try:
        if isinstance(value, str | bytes | bool | np.bool_) or value is None:
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise SchemaError(f"expected {what} to be a number, got {_short(value)}") from None
    if not math.isfinite(number):
        raise SchemaError(f"expected {what} to be finite, got {number}")
    return number


def _is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and isinstance(given.get("role"), str) and isinstance(given.get("content"), str)


def _mapping(given: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise SchemaError(f"expected {what} to be a table, got {_short(given)}")
    return given


def _short(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a class of the user's may raise anything when it is shown
        text = f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
