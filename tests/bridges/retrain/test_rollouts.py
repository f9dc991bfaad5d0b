"""Episodes by the bridge against those of an independent model of retrain."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from streamrl.bridges.retrain import create_retrain_bridge
from streamrl.bridges.retrain.trajectories import processed_trajectory
from streamrl.errors import SchemaError
from streamrl.producers.branches import branched
from streamrl.producers.episode import samples_of
from streamrl.schemas.samples import Status
from tests.bridges.retrain.playing import LOOK, QWEN, TEXTS, played
from tests.bridges.retrain.reference import Calculator, Guess, episode, prompt_of
from tests.support.scripted import rollout_engine


def act(text: str) -> dict[str, Any]:
    """What a parser of retrain's makes of these texts."""
    if text == LOOK:
        call = {"tool_name": "look", "tool_input": {}}
        return {"action_type": "tool_call", "text": "", "tool_call": call, "raw_llm_output": text, "reasoning": None}
    return {"action_type": "text_response", "text": text, "tool_call": None, "raw_llm_output": text, "reasoning": None}


def length(prompt: str, completion: str, info: Any) -> float:
    return 0.125 * len(completion)


def won(raw: Any, infos: Sequence[Any]) -> float:
    return 4.0 * sum(info.get("won", False) for info in infos)


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("strategy", ["last_step", "all_steps_average", "all_steps_equal", ""])
async def test_an_episode_and_its_rewards_are_those_of_the_model(name: str, strategy: str) -> None:
    given = {"steps": [length], "rollouts": [(won, strategy)] if strategy else []}
    asked = Calculator(**given)
    [one], engine = await played(create_retrain_bridge(Guess, lambda: asked), TEXTS[name])

    environment = Guess()
    await environment.setup()
    raw = await episode(environment, "2+3?", [act(text) for text in TEXTS[name]])
    model = Calculator(**given)
    expected = [model.combined(raw, i, rollouts=bool(strategy)) for i in range(len(raw["executed_llm_actions"]))]
    assert one.reward == pytest.approx(sum(expected)) and one.metadata["retrain"]["rewards_per_turn"] == pytest.approx(expected)
    own = sum(raw["intrinsic_rewards_per_turn"])
    assert one.reward_parts == pytest.approx({"environment": own, "calculator": sum(expected) - own})

    [given_raw] = asked.raws
    assert asked.asked == [1], "one rollout at a time: memory is bounded by an episode"
    for key in ("full_conversation_history", "intrinsic_rewards_per_turn", "step_info_dicts_per_turn"):
        assert given_raw[key] == raw[key]
    actions = [
        {key: value for key, value in action.items() if key != "old_per_token_logps"} for action in given_raw["executed_llm_actions"]
    ]
    assert actions == raw["executed_llm_actions"]
    assert given_raw["final_environment_observation"] == raw["final_environment_observation"]
    assert [entry[2] for entry in Guess.made[0].log if entry[0] == "reset"] == [{"initial_prompt": "2+3?"}]
    assert engine.context.engine.asked  # pyright: ignore[reportAttributeAccessIssue]


async def test_tokens_log_probs_and_turn_boundaries_are_the_engines() -> None:
    asked = Calculator([length])
    episodes, engine = await played(create_retrain_bridge(Guess, lambda: asked), TEXTS["wrong, look, right"])
    [raw] = asked.raws
    requests = engine.context.engine.asked  # pyright: ignore[reportAttributeAccessIssue]
    ids = raw["rollout_metadata"]["token_ids_per_turn"]
    assert ids == [[*QWEN.encode(text), QWEN.stop_ids[0]] for text in TEXTS["wrong, look, right"]]
    for number, action in enumerate(raw["executed_llm_actions"], 1):  # as `Scripted` draws them
        drawn = [-0.01 * (place + number) for place in range(len(ids[number - 1]))]
        np.testing.assert_allclose(action["old_per_token_logps"], np.array(drawn, np.float32))
    for before, after in pairwise(requests):
        assert after.prompt_ids[: len(before.prompt_ids)] == before.prompt_ids, "nothing was tokenised again"

    [sample] = samples_of(engine.context.task, branched(episodes), producer="p")
    turns = processed_trajectory(sample, QWEN)
    assert [turn["completion_text"] for turn in turns] == TEXTS["wrong, look, right"]
    assert [turn["prompt_text"] for turn in turns] == [QWEN.decode(request.prompt_ids) for request in requests]
    assert [turn["final_combined_reward"] for turn in turns] == [
        t["final_combined_reward"] for t in (await asked.process_rollouts([raw]))[0]
    ]
    for turn, action in zip(turns, raw["executed_llm_actions"], strict=True):
        assert prompt_of(raw, 0).removeprefix("user: ") in turn["prompt_text"]
        np.testing.assert_array_equal(turn["old_per_token_logps"], action["old_per_token_logps"])


def changing(change: Callable[[list[Any], bool], list[Any]]) -> type[Guess]:
    """Start another conversation after each step of `Guess`, and note whether the episode has ended."""

    class Changing(Guess):
        async def step(self, action: Any) -> Any:
            given = await super().step(action)
            self.talk[:] = change(self.talk, given[2])
            return given

    return Changing


async def test_the_prompt_of_a_turn_is_all_that_came_before_it() -> None:
    """retrain's adapter takes the first 2 t + 1 messages, which is wrong as soon as a step adds two of them or none."""

    chatty = changing(lambda talk, ended: [*talk, {"role": "user", "content": "and again"}])
    _, engine = await played(create_retrain_bridge(chatty), ["3", LOOK, "7"])
    last = QWEN.decode(engine.context.engine.asked[-1].prompt_ids)  # pyright: ignore[reportAttributeAccessIssue]
    assert [last.count(text) for text in ("2+3?", "wrong", "and again", "<tool_response>\n7")] == [1, 1, 2, 1]


async def test_how_an_episode_ends_is_its_status() -> None:
    for texts, status, reward in ((["7"], Status.COMPLETED, 1.0), (["1", "2", "3", "4", "5"], Status.TRUNCATED, -2.0)):
        [one], _ = await played(create_retrain_bridge(Guess), texts)
        assert (one.status, one.reward, one.metadata["retrain"]["terminated"]) == (status, reward, status is Status.COMPLETED)
    [one], _ = await played(create_retrain_bridge(Guess, max_steps=2), TEXTS["never"])
    assert len(one.turns) == 2
    prompt = rollout_engine(QWEN, []).context.task.prompt_ids
    [full], _ = await played(create_retrain_bridge(Guess, show_tools=False), TEXTS["never"], max_len=len(prompt) + 40)
    assert full.status is Status.TRUNCATED and 1 <= len(full.turns) < 4 and full.reward == -0.5 * len(full.turns)


async def test_the_turns_rewards_become_one_and_are_put_on_0_to_1() -> None:
    ways: Any = {"sum": 0.75, "mean": 0.25, "last": 1.0}
    for combine, reward in ways.items():
        [one], _ = await played(create_retrain_bridge(Guess, combine=combine), TEXTS["wrong, look, right"])
        assert one.reward == pytest.approx(reward), combine
    [one], _ = await played(create_retrain_bridge(Guess, reward_range=(-2, 1)), TEXTS["wrong, look, right"])
    assert (one.reward, one.reward_parts) == (pytest.approx(2.75 / 3), {})
    with pytest.raises(SchemaError, match=r"\[-1, 0.5\], got 0.75"):
        await played(create_retrain_bridge(Guess, reward_range=(-1, 0.5)), TEXTS["wrong, look, right"])


async def test_the_runs_own_reward_is_left_to_it_and_a_run_may_have_no_environment() -> None:
    [one], _ = await played(create_retrain_bridge(Guess, use_run_reward=True), ["7"])
    assert one.reward is None and one.metadata == {"retrain": {"terminated": True, "turns": [0, 1]}}
    [one], _ = await played(create_retrain_bridge(None, lambda: Calculator([length])), ["77"])
    assert (one.reward, one.status) == (0.25, Status.COMPLETED)


async def test_an_environment_plays_one_episode_after_another_and_no_two_at_a_time() -> None:
    bridge = create_retrain_bridge(Guess)
    for _ in range(3):
        await played(bridge, ["7"])
    assert len(Guess.made) == 1 and [entry[0] for entry in Guess.made[0].log].count("reset") == 3
    inside: list[int] = []

    class Slow(Guess):
        async def step(self, action: Any) -> Any:
            inside.append(id(self))
            if len(inside) == 1:
                await played(shared, ["7"])
            return await super().step(action)

    shared = create_retrain_bridge(Slow)
    await played(shared, ["7"])
    assert len(set(inside)) == 2


async def test_an_environment_that_rewrites_its_conversation_or_is_silent_begins_a_chat() -> None:
    forgets = changing(lambda talk, ended: talk if ended else [{"role": "user", "content": "so far: nothing"}])
    episodes, engine = await played(create_retrain_bridge(forgets), ["3", "7"])
    assert [one.turns for one in episodes] == [("3",), ("7",)] and [one.reward for one in episodes] == [None, 0.5]
    samples = samples_of(engine.context.task, branched(episodes), producer="p")
    assert [sample.reward for sample in samples] == [0.5, 0.5], "they share the rollout's reward"
    assert [[t["final_combined_reward"] for t in processed_trajectory(sample, QWEN)] for sample in samples] == [[-0.5], [1.0]]

    silent = changing(lambda talk, ended: talk if ended else talk[:-1])
    episodes, engine = await played(create_retrain_bridge(silent), ["3", "7"])
    assert QWEN.decode(engine.context.engine.asked[-1].prompt_ids).count("assistant") == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert [one.turns for one in episodes] == [("3",), ("7",)]


async def test_an_environment_need_not_keep_the_models_own_messages() -> None:
    forgetful = changing(lambda talk, ended: [message for message in talk if message["role"] != "assistant"])
    [one], _ = await played(create_retrain_bridge(forgetful), ["3", LOOK, "7"])
    assert one.turns == ("3", LOOK, "7")


async def test_tools_of_the_environment_are_shown_and_must_be_those_that_are_asked_for() -> None:
    _, engine = await played(create_retrain_bridge(Guess, tools=["look"]), ["7"])
    assert '"name": "look"' in QWEN.decode(engine.context.engine.asked[0].prompt_ids)  # pyright: ignore[reportAttributeAccessIssue]
    _, engine = await played(create_retrain_bridge(Guess, show_tools=False), ["7"])
    assert engine.context.engine.asked[0].prompt_ids == engine.context.task.prompt_ids  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(SchemaError, match="it lacks sql") as caught:
        await played(create_retrain_bridge(Guess, tools=["look", "sql"]), ["7"])
    assert "it has look" in caught.value.hint


async def test_what_is_odd_about_a_turn_is_told_to_the_rewards() -> None:
    asked = Calculator()
    unknown = LOOK.replace("look", "dig") + "\n" + LOOK
    await played(create_retrain_bridge(Guess, lambda: asked), [unknown, "7"])
    assert asked.raws[0]["step_info_dicts_per_turn"] == [{"tool": "dig", "further_tool_calls": 1, "unknown_tool": "dig"}, {"won": True}]


async def test_a_parser_of_the_users_reads_the_turns() -> None:
    def parse(turn: Any, observation: Any) -> Any:
        return {"text": turn.text.removeprefix("<answer>").removesuffix("</answer>")}

    [one], _ = await played(create_retrain_bridge(Guess, parse=parse), ["<answer>7</answer>"])
    assert one.reward == 1.0
    for made, said in (
        (lambda turn, seen: None, "to be a table, got None"),
        (lambda turn, seen: {"txet": "7"}, "got txet besides"),
        (lambda turn, seen: {"action_type": "think"}, "got 'think'"),
        (lambda turn, seen: {"action_type": "tool_call"}, "tool_call of an action"),
        (lambda turn, seen: {"action_type": "tool_call", "tool_call": {"tool_name": 3}}, "to be a text"),
    ):
        with pytest.raises(SchemaError, match=said):
            await played(create_retrain_bridge(Guess, parse=made), ["7"])
