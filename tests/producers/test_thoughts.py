"""Thoughts that a prompt has opened: a reward sees that, and one that was truncated leaves nothing to grade."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from streamrl.producers.chat_format import ChatFormat
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.grading import GradingRequest
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.producers.single_turn import SingleTurn
from streamrl.rewards.factory import built_in
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.chat_templates import family
from tests.support.rolling import runner_of
from tests.support.scripted import Scripted

CLOSED, CUT, ANSWERED = "2+3 is #### 5\n</think>\n\n#### 6", "2+3 is #### 6", "#### 6"


def task_of(name: str, thinking: bool | None, max_new_tokens: int = 500) -> RolloutTask:
    given = None if thinking is None else {"enable_thinking": thinking}
    prompt = ChatFormat(family(name), chat_template=True).text_prompt("2+3?", given)
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return RolloutTask(
        run="r", index=3, source="main", prompt="2+3?", prompt_ids=tuple(prompt), label="6", sampling=sampling, num_rollouts=1
    )


@pytest.mark.parametrize(
    ("name", "thinking", "text", "reward"),
    [
        ("qwen3.5", True, CLOSED, 1.0),
        ("qwen3.5", True, CUT, 0.0),
        ("qwen3.5", False, ANSWERED, 1.0),
        ("qwen3", None, f"<think>\n{CLOSED}", 1.0),
        ("qwen3", None, f"<think>\n{CUT}", 0.0),
        ("qwen3", False, ANSWERED, 1.0),
        ("llama3", None, ANSWERED, 1.0),
    ],
)
async def test_a_thought_is_graded_by_what_follows_it(name: str, thinking: bool | None, text: str, reward: float) -> None:
    cut = text.endswith(CUT)
    task = task_of(name, thinking, len(family(name).encode(text)) if cut else 500)
    runner = runner_of(Scripted(family(name), [text]), family(name), SingleTurn(), built_in("gsm8k", {}))
    [episode] = (await runner.run(task)).episodes
    await runner.close()
    assert (episode.turns, episode.finish_reason, episode.reward) == ((text,), "length" if cut else "stop", reward)
    assert episode.thinking == (name == "qwen3.5" and thinking)


@pytest.mark.parametrize(("second", "reward"), [(CLOSED, 1.0), (CUT, 0.0)])
async def test_each_turn_of_a_chat_has_a_prompt_of_its_own(second: str, reward: float) -> None:
    async def two_turns(task: RolloutTask, engine: RolloutEngine) -> Episode:
        chat = engine.chat(task)
        await chat.generate()
        chat.user("Go on.")
        await chat.generate()
        return chat.episode()

    for texts, opens, expected in (((CLOSED, second), True, reward), ((CUT, CUT), False, 1.0)):
        task = msgspec.structs.replace(task_of("qwen3.5", opens), chat_template_kwargs={"enable_thinking": opens})
        runner = runner_of(Scripted(family("qwen3.5"), texts), family("qwen3.5"), two_turns, built_in("gsm8k", {}))
        [episode] = (await runner.run(task)).episodes
        assert (episode.thinking, episode.reward) == (opens, expected)
        # Whoever grades it later finds out anew.
        request = GradingRequest(task, (msgspec.structs.replace(episode, reward=None, thinking=False),))
        [later] = (await runner.score(task, GradingRequest.decode(request.encode()).episodes)).episodes
        assert (later.thinking, later.reward) == (opens, expected)
        await runner.close()


@pytest.mark.parametrize(
    ("kind", "label", "answer", "options"),
    [
        ("exact_match", "6", "6", {}),
        ("gsm8k", "6", "#### 6", {}),
        ("math", "6", r"\boxed{6}", {}),
        ("boxed_math", "6", r"\boxed{6}", {}),
        ("dapo", "6", "Answer: 6", {}),
        ("dapo", "6", r"\boxed{6}", {"strict_box": True}),
        ("deepscaler", "6", r"\boxed{6}", {"marker": False}),
        ("f1", "six", "six", {}),
        ("gpqa", "B", "B", {}),
    ],
)
async def test_no_kind_grades_a_thought_that_did_not_end(kind: str, label: str, answer: str, options: dict[str, Any]) -> None:
    task = RolloutTask(run="r", index=3, source="main", label=label, num_rollouts=1)
    found = []
    for thinking, text in ((True, answer), (True, f"hm</think>{answer}"), (False, answer)):
        episode = Episode(
            segments=(Segment([1]), Segment([2], [-0.5], (VersionSpan(1, Version(0, 1)),))),
            finish_reason="length",
            turns=(text,),
            thinking=thinking,
        )
        [value] = await built_in(kind, options).score(task, [episode])
        found.append(getattr(value, "value", value))
    assert found == [-1.0 if kind == "dapo" else 0.0, 1.0, 1.0]
