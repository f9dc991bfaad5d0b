"""Episodes by the bridge against those of an independent model of retrain, and what becomes of parts that misbehave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from streamrl.bridges.retrain import RetrainBridge, create_retrain_bridge
from streamrl.bridges.retrain.trajectories import processed_trajectory
from streamrl.errors import ConfigError, EngineError, SchemaError
from streamrl.producers.branches import branched
from streamrl.producers.episode import Episode, samples_of
from streamrl.producers.functions import FunctionProducer, is_async
from streamrl.producers.protocol import Failure
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.schemas.samples import Status
from tests.bridges.retrain.reference import Calculator, Guess, episode, prompt_of
from tests.support.chat_templates import family
from tests.support.scripted import rollout_engine

QWEN = family("qwen3")
LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TEXTS = {
    "at once": ["7"],
    "wrong, look, right": ["3", LOOK, "7"],
    "never": ["1", "2", "3", "4", "5"],
}


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


async def played(bridge: RetrainBridge, texts: Sequence[str], **context: Any) -> tuple[list[Episode], RolloutEngine]:
    engine = rollout_engine(QWEN, texts, **context)
    return await bridge(engine.context.task, engine), engine


@pytest.fixture(autouse=True)
def fresh() -> None:
    Guess.made = []


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


async def test_the_prompt_of_a_turn_is_all_that_came_before_it() -> None:
    """retrain's adapter takes the first 2 t + 1 messages, which is wrong as soon as a step adds two of them or none."""

    class Chatty(Guess):
        async def step(self, action: Any) -> Any:
            given = await super().step(action)
            self.talk.append({"role": "user", "content": "and again"})
            return given

    _, engine = await played(create_retrain_bridge(Chatty), ["3", LOOK, "7"])
    last = QWEN.decode(engine.context.engine.asked[-1].prompt_ids)  # pyright: ignore[reportAttributeAccessIssue]
    assert [last.count(text) for text in ("2+3?", "wrong", "and again", "<tool_response>\n7")] == [1, 1, 2, 1]


async def test_how_an_episode_ends_is_its_status() -> None:
    for texts, status, reward in (
        (["7"], Status.COMPLETED, 1.0),
        (["1", "2", "3", "4", "5"], Status.TRUNCATED, -2.0),
    ):
        [one], _ = await played(create_retrain_bridge(Guess), texts)
        assert (one.status, one.reward, one.metadata["retrain"]["terminated"]) == (status, reward, status is Status.COMPLETED)
    [one], _ = await played(create_retrain_bridge(Guess, max_steps=2), TEXTS["never"])
    assert len(one.turns) == 2
    prompt = rollout_engine(QWEN, []).context.task.prompt_ids
    [full], _ = await played(create_retrain_bridge(Guess, show_tools=False), TEXTS["never"], max_len=len(prompt) + 40)
    assert full.status is Status.TRUNCATED and 1 <= len(full.turns) < 4 and full.reward == -0.5 * len(full.turns)


@pytest.mark.parametrize(("combine", "reward"), [("sum", 0.75), ("mean", 0.25), ("last", 1.0)])
async def test_the_turns_rewards_become_one(combine: Any, reward: float) -> None:
    [one], _ = await played(create_retrain_bridge(Guess, combine=combine), TEXTS["wrong, look, right"])
    assert one.reward == pytest.approx(reward)


async def test_rewards_of_another_scale_are_put_on_0_to_1() -> None:
    [one], _ = await played(create_retrain_bridge(Guess, reward_range=(-2, 1)), TEXTS["wrong, look, right"])
    assert (one.reward, one.reward_parts) == (pytest.approx(2.75 / 3), {})
    with pytest.raises(SchemaError, match=r"expected a reward in \[-1, 0.5\], got 0.75"):
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
    class Forgets(Guess):
        async def step(self, action: Any) -> Any:
            given = await super().step(action)
            if not given[2]:
                self.talk[:] = [{"role": "user", "content": "so far: nothing"}]
            return given

    episodes, engine = await played(create_retrain_bridge(Forgets), ["3", "7"])
    assert [one.turns for one in episodes] == [("3",), ("7",)] and [one.reward for one in episodes] == [None, 0.5]
    samples = samples_of(engine.context.task, branched(episodes), producer="p")
    assert [sample.reward for sample in samples] == [0.5, 0.5], "they share the rollout's reward"
    assert [[t["final_combined_reward"] for t in processed_trajectory(sample, QWEN)] for sample in samples] == [[-0.5], [1.0]]

    class Silent(Guess):
        async def step(self, action: Any) -> Any:
            given = await super().step(action)
            if not given[2]:
                del self.talk[-1]
            return given

    episodes, engine = await played(create_retrain_bridge(Silent), ["3", "7"])
    assert QWEN.decode(engine.context.engine.asked[-1].prompt_ids).count("assistant") == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert [one.turns for one in episodes] == [("3",), ("7",)]


async def test_an_environment_need_not_keep_the_models_own_messages() -> None:
    class Forgetful(Guess):
        async def step(self, action: Any) -> Any:
            given = await super().step(action)
            self.talk[:] = [message for message in self.talk if message["role"] != "assistant"]
            return given

    [one], _ = await played(create_retrain_bridge(Forgetful), ["3", LOOK, "7"])
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


GOOD = {"current_conversation": [{"role": "user", "content": "x"}], "available_tools": [], "requires_llm_action": True}
WRONG: list[tuple[str, Any, str]] = [
    ("reset", None, r"expected \(observation, info\)"),
    ("reset", ({}, {}), "expected current_conversation, available_tools, requires_llm_action"),
    ("reset", ({**GOOD, "current_conversation": []}, {}), "at least one message"),
    ("reset", ({**GOOD, "current_conversation": "x"}, {}), "both texts, as current_conversation"),
    ("reset", ({**GOOD, "current_conversation": [{"role": "user", "content": None}]}, {}), "both texts"),
    ("reset", ({**GOOD, "requires_llm_action": False}, {}), "requires an action"),
    ("reset", ({**GOOD, "available_tools": ["look"]}, {}), "a list of tables as available_tools"),
    ("reset", ({**GOOD, "available_tools": [{"nome": "look"}]}, {}), "to have a name"),
    ("step", None, r"step 0, got None"),
    ("step", (GOOD, 1.0, False, {}), "terminated, truncated, info"),
    ("step", (GOOD, None, True, False, {}), "the reward of the environment's step 0 to be a number, got None"),
    ("step", (GOOD, float("nan"), True, False, {}), "to be finite, got nan"),
    ("step", (GOOD, "1", True, False, {}), "to be a number, got '1'"),
    ("step", (GOOD, np.zeros(2), True, False, {}), "to be a number"),
    ("step", (GOOD, True, True, False, {}), "to be a number, got True"),
    ("step", (GOOD, 1.0, "yes", False, {}), "terminated of the environment's step 0"),
    ("step", (GOOD, 1.0, True, False, None), "info of the environment's step 0 to be a table"),
    ("step", ([], 1.0, True, False, {}), "the observation of the environment's step 0 to be a table"),
    ("step", ({**GOOD, "requires_llm_action": False}, 0.0, False, False, {}), "neither ended the episode nor requires an action"),
]


@pytest.mark.parametrize(("method", "given", "said"), WRONG)
async def test_what_an_environment_gives_is_looked_at_key_by_key(method: str, given: Any, said: str) -> None:
    class Wrong(Guess):
        pass

    async def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        return given

    setattr(Wrong, method, answer)
    with pytest.raises(SchemaError, match=said):
        await played(create_retrain_bridge(Wrong), ["3", "7"])
    assert [environment.is_closed for environment in Wrong.made] == [True]


class Loses:
    """An engine whose server goes away at the second call."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.calls = engine, 0

    async def generate(self, request: Any) -> AsyncIterator[Any]:
        self.calls += 1
        if self.calls == 2:
            raise EngineError("the engine went away")
        async for chunk in self.engine.generate(request):
            yield chunk


async def test_errors_are_the_rollouts_own_but_those_of_engines_pass() -> None:
    class Breaks(Guess):
        async def step(self, action: Any) -> Any:
            if action["text"] == "3":
                raise RuntimeError("the game is broken")
            return await super().step(action)

        def close(self) -> None:
            super().close()
            raise OSError("and cannot be closed")

    bridge = create_retrain_bridge(Breaks)
    assert is_async(bridge)
    engine = rollout_engine(QWEN, ["3"])
    [failed] = await FunctionProducer(bridge).rollout(engine.context.task, engine.context)
    assert isinstance(failed, Failure) and (failed.reason, failed.detail) == ("failed", "RuntimeError: the game is broken")
    engine = rollout_engine(QWEN, ["7"])
    [after] = await FunctionProducer(bridge).rollout(engine.context.task, engine.context)
    assert isinstance(after, Episode) and after.reward == 1.0
    assert [environment.is_closed for environment in Breaks.made] == [True, False], "a broken one is not played in again"

    engine = rollout_engine(QWEN, ["3", "7"])
    lost: Any = Loses(engine.context.engine)
    context = type(engine.context)(**{name: getattr(engine.context, name) for name in engine.context.__struct_fields__} | {"engine": lost})
    with pytest.raises(EngineError, match="went away"):
        await FunctionProducer(create_retrain_bridge(Guess)).rollout(context.task, context)


def turns_of(*rewards: Any, **more: Any) -> list[Any]:
    return [{"prompt_text": "", "completion_text": "", "final_combined_reward": reward, **more} for reward in rewards]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "expected one trajectory from the reward calculator for one rollout, got a NoneType"),
        ([], "got 0"),
        ([[], []], "got 2"),
        ([[]], "gave no turn"),
        ([None], "expected a list of turns"),
        ([turns_of(1.0)], "expected 2 turns from the reward calculator, as the episode has, got 1"),
        ([turns_of(1.0, 2.0, 3.0)], "got 3"),
        ([turns_of(1.0, 2.0) + [{"prompt_text": "other", "completion_text": "", "final_combined_reward": 0.0}] * 2], "got 4"),
        ([[{}, {}]], "expected final_combined_reward in turn 0"),
        ([turns_of(1.0, float("nan"))], "the reward of turn 1 by the calculator to be finite, got nan"),
        ([turns_of(1.0, None)], "to be a number, got None"),
        ([turns_of(1.0, "2")], "to be a number, got '2'"),
        ([turns_of(1.0, np.ones(3))], "to be a number"),
        ([turns_of(1.0, 2.0, auxiliary_data={"error": "Malformed LLMAction"})], "has failed at turn 0: Malformed LLMAction"),
    ],
)
async def test_a_calculator_that_fails_fails_the_rollout(answer: Any, said: str) -> None:
    class Wrong:
        async def process_rollouts(self, batch: Any) -> Any:
            return answer

    with pytest.raises(SchemaError, match=said):
        await played(create_retrain_bridge(Guess, Wrong), ["3", "7"])


async def test_a_calculator_that_raises_gives_no_silent_zero() -> None:
    class Raises:
        def process_rollouts(self, batch: Any) -> Any:
            raise KeyError("expected_answer")

    engine = rollout_engine(QWEN, ["7"])
    [failed] = await FunctionProducer(create_retrain_bridge(Guess, Raises)).rollout(engine.context.task, engine.context)
    assert isinstance(failed, Failure) and failed.detail.startswith("KeyError: 'expected_answer'")
    with pytest.raises(SchemaError, match="with process_rollouts, got a dict"):
        await played(create_retrain_bridge(Guess, dict), ["7"])


async def test_plain_methods_and_numbers_of_other_libraries_are_taken() -> None:
    class Plain:
        def process_rollouts(self, batch: Any) -> Any:
            return [turns_of(np.float32(0.5))]

    [one], _ = await played(create_retrain_bridge(Guess, Plain), ["7"])
    assert one.reward == 0.5


async def test_a_long_episode_goes_on_where_its_producer_died() -> None:
    stored: dict[int, bytes] = {}

    async def store(rollout: int, data: bytes) -> None:
        stored[rollout] = data

    class Dies(Guess):
        deaths = 1

        async def step(self, action: Any) -> Any:
            if action["text"] == "2" and Dies.deaths:
                Dies.deaths -= 1
                raise SystemExit(9)
            return await super().step(action)

    whole, _ = await played(create_retrain_bridge(Guess), ["1", "2", LOOK, "7"])
    bridge = create_retrain_bridge(Dies, checkpoint=True)
    with pytest.raises(SystemExit):
        await played(bridge, ["1", "2", LOOK, "7"], store=store)
    again, engine = await played(bridge, [LOOK, "7"], store=store, resumes=dict(stored))
    assert len(engine.context.engine.asked) == 2, "what was written is not written again"  # pyright: ignore[reportAttributeAccessIssue]
    assert [(one.turns, one.reward) for one in again] == [(one.turns, one.reward) for one in whole]
    assert [s.token_ids for one in again for s in one.segments] == [s.token_ids for one in whole for s in one.segments]

    class Other(Guess):
        async def reset(self, **given: Any) -> Any:
            shown = await super().reset(**given)
            self.hint = "otherwise"
            return shown

    with pytest.raises(SchemaError, match="to show again what it had shown before turn 3"):
        await played(create_retrain_bridge(Other, checkpoint=True), ["7"], store=store, resumes=dict(stored))


async def test_an_episode_too_large_to_keep_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    async def store(rollout: int, data: bytes) -> None:
        raise SchemaError("the rollout's chats are too large together")

    [one], _ = await played(create_retrain_bridge(Guess, checkpoint=True), TEXTS["wrong, look, right"], store=store)
    assert one.reward == 0.75
    assert [record.message.split()[0] for record in caplog.records] == ["event=checkpoint_too_large"]


async def test_a_prompt_that_is_no_text_is_refused() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}]
    with pytest.raises(SchemaError, match="got messages of system, user"):
        await played(create_retrain_bridge(Guess), ["7"], prompt=messages)


def factory(size: int) -> Guess:
    return Guess(str(size))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"environment": None}, "nobody would give a reward"),
        ({"environment": Guess()}, "expected environment to be a class or a function that makes one, got a Guess"),
        ({"environment": "nothing.py:Maze"}, "there is none"),
        ({"environment": "json:lodas"}, "called 'lodas'"),
        ({"environment": factory}, "expected environment to be called without arguments"),
        ({"environment": factory, "environment_options": {"sise": 3}}, "to be called with sise"),
        ({"environment": Guess, "reward_calculator": Calculator()}, "expected reward_calculator to be a class or a function"),
        ({"environment": Guess, "combine": "max"}, "combine to be one of sum, mean, last, got 'max'"),
        ({"environment": Guess, "reward_range": (1, 1)}, "two finite numbers"),
        ({"environment": Guess, "reward_range": (0, float("inf"))}, "two finite numbers"),
        ({"environment": Guess, "reward_range": 3}, "two finite numbers"),
        ({"environment": Guess, "max_steps": -1}, "max_steps to be a whole number"),
        ({"environment": Guess, "parse": "json"}, "parse must name a parser"),
        ({"environment": Guess, "parse": Guess.step}, "plain function"),
        ({"environment": Guess, "reward_calculator": Calculator, "use_run_reward": True}, "decides alone"),
    ],
)
def test_what_cannot_be_is_refused_before_any_rollout(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        create_retrain_bridge(**given)
    assert [environment.log for environment in Guess.made] == [[]] * len(Guess.made)
