"""Chats that leave one another: what they share, that each token is trained once, and that a save brings them back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.producers.branches import branched, num_shared
from streamrl.producers.chat import Chat
from streamrl.producers.episode import Episode, samples_of
from streamrl.producers.rollout_engine import RolloutEngine
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Branch, Sample
from tests.support.chat_templates import family
from tests.support.scripted import rollout_engine

QWEN = family("qwen3")


def engine_for(**context: Any) -> RolloutEngine:
    return rollout_engine(QWEN, (f"turn {number}" for number in itertools.count()), **context)


async def begun(**context: Any) -> tuple[RolloutEngine, Chat]:
    """A rollout, and its first chat after a turn."""
    engine = engine_for(**context)
    chat = engine.chat(engine.context.task)
    await chat.generate()
    return engine, chat


def rows(engine: RolloutEngine, episodes: Sequence[Episode]) -> list[Sample]:
    """As they come off the wire."""
    task = engine.context.task
    return decode_samples(encode_samples(samples_of(task, branched(episodes), producer="p"))).rows()


def trained(samples: Sequence[Sample]) -> list[str]:
    """What is trained, in texts: of each stretch of the loss mask."""
    found = []
    for sample in samples:
        edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask, [0]])))
        found += [QWEN.decode(sample.tokens[a:b].tolist()) for a, b in edges.reshape(-1, 2)]
    return [text.replace("<|im_end|>", "") for text in found]


async def test_a_branch_goes_on_from_the_same_tokens_and_trains_its_own() -> None:
    engine, chat = await begun()
    chat.user("and?")
    await chat.generate()
    fork = chat.branch(keep=1)
    assert fork.token_ids == chat.token_ids[: len(fork.token_ids)] and fork.turns == chat.turns[:1]
    fork.user("or?")
    await fork.generate()
    deeper = fork.branch()
    deeper.user("so?")
    await deeper.generate()
    samples = rows(engine, [chat.episode(), fork.episode(), deeper.episode()])
    first, second = chat.episode().segments[:2], fork.token_ids
    shared = sum(len(segment.token_ids) for segment in first)
    assert [sample.branch for sample in samples] == [None, Branch(0, shared), Branch(1, len(second))]
    assert trained(samples) == ["turn 0", "turn 1", "turn 2", "turn 3"]
    asked = engine.context.engine.asked  # type: ignore[attr-defined]
    assert len({request.session for request in asked}) == 1, "for the engine that has the prefix"
    assert len({request.seeds for request in asked}) == 4


async def test_without_its_parent_a_branch_trains_what_it_took_over() -> None:
    engine, chat = await begun()
    ends = []
    for _ in range(2):
        chat.branch()
        fork = chat.branch()
        fork.user("or?")
        await fork.generate()
        ends.append(fork.episode())
    samples = rows(engine, ends)
    assert trained(samples) == ["turn 0", "turn 1", "turn 2"]
    assert [sample.branch for sample in samples] == [None, Branch(0, len(chat.token_ids))]


async def test_equal_tokens_that_were_drawn_apart_are_trained_apart() -> None:
    engine = rollout_engine(QWEN, itertools.repeat("the same"))
    forks = [engine.chat(engine.context.task) for _ in range(2)]
    root = engine.chat(engine.context.task)
    await root.generate()
    forks += [root.branch(keep=0), root.branch(keep=0)]
    for fork in forks:
        await fork.generate()
    samples = rows(engine, [root.episode(), *(fork.episode() for fork in forks)])
    assert trained(samples) == ["the same"] * 5
    assert len({request.seeds for request in engine.context.engine.asked}) == 5  # type: ignore[attr-defined]
    assert [sample.branch for sample in samples] == [None, None, None, *[Branch(0, len(engine.context.task.prompt_ids))] * 2]


async def test_a_chat_returned_as_it_was_and_as_it_is_trains_its_turns_once() -> None:
    engine, chat = await begun()
    early = chat.episode()
    chat.user("and?")
    await chat.generate()
    assert trained(rows(engine, [early, chat.episode()])) == ["turn 0", "turn 1"]


@pytest.mark.parametrize("order", [(1, 1), (1, 0), (0, 1, 1)])
async def test_what_has_no_token_of_its_own_is_refused(order: tuple[int, ...]) -> None:
    engine = engine_for()
    chat = engine.chat(engine.context.task)
    made = []
    for _ in range(2):
        await chat.generate()
        made.append(chat.episode())
        chat.user("go on")
    with pytest.raises(SchemaError, match="a second time"):
        branched([made[place] for place in order])


async def test_a_branch_before_its_parent_and_an_empty_one_are_refused() -> None:
    engine, chat = await begun()
    fork = chat.branch()
    with pytest.raises(SchemaError, match="and to go on"):
        rows(engine, [chat.episode(), fork.episode()])
    fork.user("or?")
    await fork.generate()
    with pytest.raises(SchemaError, match="comes after a branch"):
        branched([fork.episode(), chat.episode()])
    for keep in (-1, 2):
        with pytest.raises(SchemaError, match="0 to 1 turns"):
            chat.branch(keep=keep)
        with pytest.raises(SchemaError, match="0 to 1 turns"):
            chat.compact("x", keep=keep)


async def test_a_summary_stands_for_what_is_left_out() -> None:
    engine = engine_for(prompt=[{"role": "system", "content": "add"}, {"role": "user", "content": "2+3?"}])
    chat = engine.chat(engine.context.task)
    for _ in range(3):
        await chat.generate()
        chat.user("go on")
    shorter, kept = chat.compact("so far: 5"), chat.compact("so far: 5", keep=1)
    opening = "<|im_start|>system\nadd<|im_end|>\n<|im_start|>user\n2+3?<|im_end|>\n"
    summary = "<|im_start|>user\nso far: 5<|im_end|>\n<|im_start|>assistant\n"
    assert QWEN.decode(shorter.token_ids) == opening + summary
    assert QWEN.decode(kept.token_ids) == f"{opening}<|im_start|>assistant\nturn 0<|im_end|>\n{summary}"
    await shorter.generate()
    await kept.generate()
    again = shorter.compact("and then 6")
    assert QWEN.decode(again.token_ids) == opening + summary.replace("<|im_start|>assistant\n", "") + summary.replace(
        "so far: 5", "and then 6"
    )
    await again.generate()
    samples = rows(engine, [chat.episode(), shorter.episode(), kept.episode(), again.episode()])
    assert trained(samples) == ["turn 0", "turn 1", "turn 2", "turn 3", "turn 4", "turn 5"]
    assert [sample.branch and sample.branch.parent for sample in samples] == [None, 0, 0, 1]


async def test_a_chat_of_token_ids_has_no_messages_to_put_a_summary_behind() -> None:
    engine = engine_for()
    chat = engine.chat([5, 6])
    await chat.generate()
    with pytest.raises(SchemaError, match="no messages"):
        chat.compact("x")
    assert chat.compact("x", keep=1).token_ids[:2] == (5, 6)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.booleans()), min_size=1, max_size=8), st.data())
def test_every_sampled_token_is_trained_exactly_once(forks: list[tuple[int, int, bool]], data: st.DataObject) -> None:
    """Random trees of chats, of which some are returned: each turn that one of them holds is trained in one of them."""

    async def grow() -> tuple[RolloutEngine, list[Chat]]:
        engine = engine_for()
        chats = [engine.chat(engine.context.task)]
        await chats[0].generate()
        for of, keep, summary in forks:
            parent = chats[of % len(chats)]
            keep = min(keep, len(parent.turns))
            chat = parent.compact("sum", keep=keep) if summary else parent.branch(keep=keep)
            for _ in range(2):
                if chat.turns and QWEN.decode(chat.token_ids).endswith("<|im_end|>"):
                    chat.user("?")
                await chat.generate()
            chats.append(chat)
        return engine, chats

    engine, chats = asyncio.run(grow())
    given_back = data.draw(st.lists(st.sampled_from(range(len(chats))), unique=True, min_size=1).map(sorted))
    episodes = [chats[number].episode() for number in given_back]
    samples = rows(engine, episodes)
    held = {turn.text for number in given_back for turn in chats[number].turns}
    assert sorted(trained(samples)) == sorted(held)


def test_what_two_chats_have_from_the_same_place() -> None:
    root, left, right = ((0, 0),), ((0, 0), (1, 10)), ((0, 0), (2, 7))
    deeper = (*left, (3, 12))
    for one, other, count in [
        (root, left, 10),
        (left, right, 7),
        (deeper, left, 12),
        (deeper, root, 10),
        (deeper, right, 7),
        (((4, 0),), root, 0),
    ]:
        assert num_shared(one, other) == num_shared(other, one) == count
    assert num_shared((), ()) == 0


async def test_branches_are_saved_and_gone_on_from() -> None:
    stored: dict[int, bytes] = {}

    async def store(rollout: int, data: bytes) -> None:
        stored[rollout] = data

    async def agent(engine: RolloutEngine, *, until: int) -> list[Episode]:
        chat = engine.chat(engine.context.task)
        if not chat.turns:
            await chat.generate()
            await chat.save()
        fork, shorter = chat.branch(), chat.compact("so far", keep=1)
        for number, each in enumerate((fork, shorter)):
            if len(each.turns) == 1 and number < until:
                if number == 0:
                    each.user("or?")
                await each.generate()
                await each.save(f"fork {number}")
        return [each.episode() for each in (chat, fork, shorter)]

    whole = await agent(engine_for(store=store), until=2)
    stored.clear()
    before = engine_for(store=store)
    await agent(before, until=1)
    after = rollout_engine(QWEN, ["turn 2"], store=store, resumes=dict(stored))
    again = await agent(after, until=2)
    assert [[s.token_ids for s in e.segments] for e in again] == [[s.token_ids for s in e.segments] for e in whole]
    assert len(after.context.engine.asked) == 1  # type: ignore[attr-defined]
    assert [row.branch for row in rows(after, again)] == [row.branch for row in rows(before, whole)]


async def test_a_save_of_another_place_is_not_used() -> None:
    stored: dict[int, bytes] = {}

    async def store(rollout: int, data: bytes) -> None:
        stored[rollout] = data

    _, chat = await begun(store=store)
    fork = chat.branch()
    fork.user("or?")
    await fork.generate()
    await fork.save()
    other = engine_for(resumes=dict(stored))
    first = other.chat(other.context.task)
    assert first.turns == () and first.branch().turns == (), "the chat that it left was not saved, so there is nothing to go on from"
    second = engine_for(resumes=dict(stored))
    second.chat(second.context.task)
    assert second.chat(second.context.task).turns == (), "no branch"
