"""Sampling from a row and a turn to the trainer: what is asked, what is recorded by name, what is marked, what is masked."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from streamrl.core.records import Poison, Rollouts, judge
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.table.engine import TableEngine
from streamrl.errors import SchemaError
from streamrl.producers.blocking import BlockingChat
from streamrl.producers.demonstrations import demonstration
from streamrl.producers.episode import Episode, Segment, samples_of
from streamrl.producers.single_turn import SingleTurn
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask, Sampling
from streamrl.schemas.versions import Version
from tests.support.errors import raises
from tests.support.rolling import context_of, engine_of, task_of

ANSWER = "ab</a>cd"
ANSWERS = {(place, before): after for place, before, after in zip(range(8), ["<|assistant|>", *ANSWER], ANSWER, strict=False)}


async def test_a_text_ends_before_its_stop_string_and_its_tokens_with_it(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer, prompt="<|user|>3<|end|><|assistant|>", sampling=Sampling(stop=("</a>",)))
    context = context_of(engine, tokenizer, task)
    [episode] = await SingleTurn().rollout(task, context)
    assert isinstance(episode, Episode)
    assert episode.turns == ("ab",) and tokenizer.decode(episode.segments[1].token_ids) == "ab</a>"
    [row] = decode_samples(encode_samples(samples_of(task, [episode], producer="p"))).rows()
    assert row.sampling == task.sampling and tokenizer.decode(row.tokens[row.loss_mask == 1].tolist()) == "ab</a>"
    assert not row.turns, "nothing is said where nothing differs"


async def test_a_turn_is_drawn_and_recorded_with_fields_of_its_own(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer, prompt="<|user|>3<|end|><|assistant|>", sampling=Sampling(min_p=0.25))
    context = context_of(engine, tokenizer, task)
    rollout = engine_of(context)
    chat = rollout.chat(task)
    first = await chat.generate(sampling={"stop": ["b"], "top_p": 0.9, "logit_bias": {9: -1.5}})
    chat.tool("7")
    second = await chat.generate(max_new_tokens=2, temperature=0.5, sampling={"min_p": 0.0})
    chat.tool("8")
    third = await chat.generate()
    assert (first.text, second.finish_reason, third.text) == ("a", "length", "ab</a>cd")
    [row] = decode_samples(encode_samples(samples_of(task, [chat.episode()], producer="p"))).rows()
    assert [turn.sampling for turn in row.turns] == [
        {"top_p": 0.9, "stop": ["b"], "logit_bias": {"9": -1.5}},
        {"temperature": 0.5, "min_p": 0.0},
        {},
    ]
    record, batch = judge("r.samples.main", 1, encode_samples([row]), "0")
    assert isinstance(record, Rollouts) and batch is not None and not record.rollouts[0].shares
    inside = [batch.drawn_at("min_p")[turn.start] for turn in row.turns]
    assert inside == [0.25, 0.0, 0.25] and batch.drawn_at("top_p")[row.turns[0].start] == np.float32(0.9)
    for wrong in ({"min_q": 1}, {"min_p": 3}, {"temperature": 0}, {"stop": "b"}):
        with raises(SchemaError):
            await chat.generate(sampling=wrong)
    for temperature in (0, -1.0, 1e-40, 1e300, float("nan"), float("inf")):
        with raises(SchemaError):
            await chat.generate(temperature=temperature)
    assert len(chat.turns) == 3, "what is refused asks nothing"


async def test_plain_functions_draw_turns_so_too(engine: TableEngine, tokenizer: Tokenizer) -> None:
    task = task_of(tokenizer, prompt="<|user|>3<|end|><|assistant|>", sampling=Sampling())
    context = context_of(engine, tokenizer, task)
    chat = engine_of(context).chat(task)
    blocking = BlockingChat(chat, asyncio.get_running_loop())
    turn = await asyncio.to_thread(blocking.generate, sampling={"stop": ["</a>"]})
    assert turn.text == "ab"


@pytest.mark.parametrize("asked", [{"presence_penalty": 0.5}, {"frequency_penalty": -0.5}, {"repetition_penalty": 1.1}])
@pytest.mark.parametrize("by_turn", [False, True])
async def test_penalties_are_marked_as_inexact_wherever_they_are_asked_for(
    engine: TableEngine, tokenizer: Tokenizer, asked: dict[str, Any], by_turn: bool
) -> None:
    task = task_of(tokenizer, prompt="<|user|>3<|end|><|assistant|>", sampling=Sampling(**({} if by_turn else asked)))
    context = context_of(engine, tokenizer, task)
    chat = engine_of(context).chat(task)
    await chat.generate(sampling=asked if by_turn else None)
    chat.tool("7")
    await chat.generate(sampling=None if by_turn else {name: getattr(Sampling(), name) for name in asked})
    rows = samples_of(task, [chat.episode()], producer="p")
    assert [turn.inexact for turn in rows[0].turns] == [True, False]
    record, _ = judge("r.samples.main", 1, encode_samples(rows), "0")
    assert isinstance(record, Rollouts)
    [one] = record.rollouts
    first, second = (turn.length for turn in rows[0].turns)
    assert one.inexact and (one.num_tokens, one.without(inexact=True, truncated=False).num_tokens) == (first + second, second)
    unmarked = [replace(rows[0], turns=tuple(replace(turn, inexact=False) for turn in rows[0].turns))]
    assert isinstance(judge("r.samples.main", 1, encode_samples(unmarked), "0")[0], Poison)


def test_samples_made_by_hand_are_marked_by_their_own_sampling_and_demonstrations_are_none(tokenizer: Tokenizer) -> None:
    task = RolloutTask(run="r", index=0, source="main", prompt_ids=(5,), num_rollouts=1)
    turn = Segment(token_ids=[6], logprobs=[-0.5], spans=(VersionSpan(1, Version(0, 1)),))
    episode = Episode(segments=(Segment([5]), turn), finish_reason="stop", sampling=Sampling(regex="a"), turns=("a",))
    [row] = samples_of(task, [episode], producer="p")
    assert [turn.inexact for turn in row.turns] == [True] and row.sampling.regex == "a"
    sampling = Sampling(presence_penalty=0.5, logit_bias={9: 1.0})
    task = RolloutTask(run="r", index=0, source="warmup", prompt_ids=(9, 10), label="12", sampling=sampling)
    row = demonstration(task, tokenizer, end_token=5, max_len=64, producer="p")
    record, _ = judge("r.samples.warmup", 1, encode_samples([row]), "0")
    assert isinstance(record, Rollouts) and record.rollouts[0].demonstration and not record.rollouts[0].inexact


def test_code_of_users_may_give_stop_strings_as_it_likes_and_no_nonsense() -> None:
    listed = Sampling(stop=["a", "b"])  # type: ignore[arg-type]
    assert listed == Sampling(stop=("a", "b")) and hash(listed) == hash(Sampling(stop=("a", "b")))
    assert Sampling(stop="ab") == Sampling(stop=("ab",))  # type: ignore[arg-type]
    one, other = Sampling(logit_bias={3: 1.0, 5: 2.0}), Sampling(logit_bias={5: 2.0, 3: 1.0})
    assert one == other and hash(one) == hash(other) and one.later() == {"logit_bias": {3: 1.0, 5: 2.0}}
    for wrong in ({"stop": (3,)}, {"logit_bias": {"3": 1.0}}, {"stop": ("a",) * 33}, {"stop": ("a" * 257,)}):
        with raises(SchemaError, key=f"sampling.{next(iter(wrong))}"):
            Sampling(**wrong)  # type: ignore[arg-type]
    with raises(SchemaError, key="sampling.json_schema"):
        Sampling(json_schema="{" * 100_000)
    with raises(SchemaError, key="sampling.json_schema"):
        Sampling(json_schema='{"a":' * 10_000)
