"""retrain's documented behaviour, modelled here without a line of streamrl's bridge: environment, calculator, and the episode between them.

Facts from retrain's interface (`Environment`, `RawRolloutData`, `RewardCalculator`) and its page on the slime backend:

- `reset(seed, options)` gives (observation, info), `step(action)` gives (observation, reward, terminated, truncated, info);
- an episode goes on until it is terminated, truncated, or has had `max_steps` turns;
- the reward of turn i is the environment's, plus every step reward of turn i, plus a share of every rollout reward: of the last turn
  (`last_step`), an equal part in each (`all_steps_average`), or the whole in each (`all_steps_equal`);
- the prompt of turn i is what stands in the conversation before its i-th assistant message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

SECRET = {"name": "look", "description": "Shows the number."}


class Guess:
    """Guess a number; `look` shows it. 1 for the number, 0.25 for a look, -0.5 for anything else."""

    max_steps = 4
    made: ClassVar[list[Guess]] = []

    def __init__(self, hint: str = "wrong") -> None:
        self.hint = hint
        self.log: list[Any] = []
        self.talk: list[dict[str, str]] = []
        self.is_set_up = self.is_closed = False
        type(self).made.append(self)

    async def setup(self) -> None:
        self.is_set_up = True

    async def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert self.is_set_up and not self.is_closed
        self.log.append(("reset", seed, options))
        self.talk = [{"role": "user", "content": (options or {})["initial_prompt"]}]
        return self.seen("initial", True), {"message": "begun"}

    async def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.log.append(("step", action["raw_llm_output"]))
        self.talk.append({"role": "assistant", "content": action["raw_llm_output"]})
        if action["action_type"] == "tool_call":
            self.talk.append({"role": "tool", "content": "7"})
            return self.seen("tool_result", True), 0.25, False, False, {"tool": action["tool_call"]["tool_name"]}
        if action["text"] == "7":
            return self.seen("final_answer_feedback", False), 1.0, True, False, {"won": True}
        self.talk.append({"role": "user", "content": self.hint})
        return self.seen("environment_state", True), -0.5, False, False, {}

    def seen(self, kind: str, requires: bool) -> dict[str, Any]:
        return {
            "observation_type": kind,
            "content": None,
            "tool_result": None,
            "current_conversation": self.talk,
            "available_tools": [SECRET],
            "requires_llm_action": requires,
        }

    def close(self) -> None:
        self.is_closed = True


class Calculator:
    """A reward calculator with step rewards and rollout rewards; with the latter it lists every turn twice, as retrain's own does."""

    def __init__(self, steps: Sequence[Callable[[str, str, Any], float]] = (), rollouts: Sequence[tuple[Any, str]] = ()) -> None:
        self.steps, self.rollouts = steps, rollouts
        self.asked: list[int] = []
        self.raws: list[Any] = []

    async def process_rollouts(self, batch: list[Any]) -> list[list[dict[str, Any]]]:
        self.asked.append(len(batch))
        self.raws += batch
        found = []
        for raw in batch:
            plain = [self.turn(raw, i, self.combined(raw, i, rollouts=False)) for i in range(len(raw["executed_llm_actions"]))]
            full = [self.turn(raw, i, self.combined(raw, i, rollouts=True)) for i in range(len(plain))]
            found.append(plain + full if self.rollouts else plain)
        return found

    def combined(self, raw: Any, i: int, *, rollouts: bool) -> float:
        turn, info = raw["executed_llm_actions"][i], raw["step_info_dicts_per_turn"][i]
        total = raw["intrinsic_rewards_per_turn"][i]
        total += sum(step(prompt_of(raw, i), turn["raw_llm_output"], info) for step in self.steps)
        count = len(raw["executed_llm_actions"])
        for function, strategy in self.rollouts if rollouts else ():
            score = function(raw, raw["step_info_dicts_per_turn"])
            total += {"last_step": score * (i == count - 1), "all_steps_average": score / count, "all_steps_equal": score}[strategy]
        return total

    def turn(self, raw: Any, i: int, reward: float) -> dict[str, Any]:
        action = raw["executed_llm_actions"][i]
        return {
            "prompt_text": prompt_of(raw, i),
            "completion_text": action["raw_llm_output"],
            "final_combined_reward": reward,
            "auxiliary_data": {"original_step_info": raw["step_info_dicts_per_turn"][i]},
            "old_per_token_logps": action["old_per_token_logps"],
        }


def prompt_of(raw: Any, i: int) -> str:
    history = raw["full_conversation_history"]
    place = [number for number, message in enumerate(history) if message["role"] == "assistant"][i]
    return "\n".join(f"{message['role']}: {message['content']}" for message in history[:place])


async def episode(environment: Any, prompt: str, actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The episode of an environment and a model that does these things one after the other."""
    seen, _ = await environment.reset(seed=0, options={"initial_prompt": prompt})
    done, rewards, infos, used = False, [], [], []
    for action in actions[: environment.max_steps]:
        if done:
            break
        seen, reward, terminated, truncated, info = await environment.step(action)
        done = terminated or truncated
        for kept, one in ((rewards, reward), (infos, info), (used, action)):
            kept.append(one)
    return {
        "full_conversation_history": [dict(message) for message in seen["current_conversation"]],
        "executed_llm_actions": used,
        "intrinsic_rewards_per_turn": rewards,
        "final_environment_observation": seen,
        "step_info_dicts_per_turn": infos,
    }
