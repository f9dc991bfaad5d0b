"""What becomes of environments, calculators and producers that misbehave, and what is refused before any rollout."""

from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from streamrl.bridges.retrain import create_retrain_bridge
from streamrl.errors import ConfigError, EngineError, SchemaError
from streamrl.producers.episode import Episode
from streamrl.producers.functions import FunctionProducer, is_async
from streamrl.producers.protocol import Failure
from tests.bridges.retrain.playing import LOOK, QWEN, TEXTS, played
from tests.bridges.retrain.reference import Calculator, Guess
from tests.support.scripted import rollout_engine

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
    assert (
        isinstance(failed, Failure)
        and failed.reason == "failed"
        and failed.detail.startswith("RuntimeError: the game is broken in test_failures.py:")
    )
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
    with pytest.raises(SchemaError, match="process_rollouts, got a dict"):
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

    with pytest.raises(SchemaError, match="before turn 3"):
        await played(create_retrain_bridge(Other, checkpoint=True), ["7"], store=store, resumes=dict(stored))


async def test_an_episode_too_large_to_keep_goes_on_without(caplog: pytest.LogCaptureFixture) -> None:
    async def store(rollout: int, data: bytes) -> None:
        raise SchemaError("the rollout's chats are too large together")

    [one], _ = await played(create_retrain_bridge(Guess, checkpoint=True), TEXTS["wrong, look, right"], store=store)
    assert one.reward == 0.75
    assert [record.message.split()[0] for record in caplog.records] == ["event=checkpoint_too_large"]


async def test_a_prompt_that_is_no_text_is_refused() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3?"}]
    with pytest.raises(SchemaError, match="of system, user"):
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
