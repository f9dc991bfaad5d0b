"""The worker records what engines gave: user code can trim it, and neither change nor invent it; and what is saved outlives a process."""

from __future__ import annotations

import asyncio
import zlib

import msgspec
import pytest

from streamrl.bus.protocol import Bus
from streamrl.producers.attempts import Attempts
from streamrl.producers.chat_saves import SavedChat
from streamrl.producers.children.calls import Recorded
from streamrl.producers.children.jobs import Keeping
from streamrl.producers.children.saved import pack, unpack
from streamrl.producers.episode import Segment
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.subjects import PREFIX_ATTEMPTS
from streamrl.schemas.versions import Version
from tests.support.processes import until
from tests.support.user_code import Workshop, ends

FORGES = """
from msgspec.structs import replace

from streamrl.producers.episode import Segment
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version


async def forges(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    episode = chat.episode()
    prompt, answer = episode.segments
    match engine.context.rollout_index:
        case 0:
            answer = replace(answer, spans=(VersionSpan(2, Version(7, 7)),))
        case 1:
            answer = replace(answer, logprobs=(-0.5, -0.5))
        case 2:
            answer = replace(answer, token_ids=(9, 9))
        case 3:
            answer = Segment(answer.token_ids[:1], answer.logprobs[:1], (VersionSpan(1, Version(0, 0)),))
        case 4:
            await chat.generate()
            both = chat.episode().segments
            tokens, logprobs = (*both[1].token_ids, *both[2].token_ids), (*both[1].logprobs, *both[2].logprobs)
            answer = Segment(tokens, logprobs, (VersionSpan(4, Version(0, 0)),))
    episode.segments = (prompt, answer)
    episode.engine = "another"
    return episode
"""


@pytest.mark.process
async def test_tokens_logprobs_and_versions_are_the_workers_own(workshop: Workshop) -> None:
    [group] = await workshop.played(FORGES, workshop.task(num_rollouts=6), producer="forges")
    found = {episode.rollout: episode for episode in group.episodes}
    true = found[5].segments[1]
    found_0, found_3 = (msgspec.structs.replace(found[rollout].segments[1], origin=true.origin) for rollout in (0, 3))  # of other times
    assert found_0 == true and true.spans == (VersionSpan(2, Version(0, 0)),)
    spans = (VersionSpan(1, Version(0, 0)),)
    drawn = {"temperature": 1.0, "sampling": true.sampling, "origin": true.origin}
    assert found_3 == Segment(true.token_ids[:1], true.logprobs[:1], spans, **drawn)
    assert len(found[4].segments[1].token_ids) == len(found[4].segments[1].logprobs) == sum(s.length for s in found[4].segments[1].spans)
    assert {episode.engine for episode in group.episodes} == {"table-0"}
    assert [failure.rollout for failure in group.failures] == [1, 2]
    assert all("not sampled by an engine" in failure.detail for failure in group.failures)


@pytest.mark.process
async def test_checkpoints_of_a_group_keep_each_turn_once_however_often_its_process_is_lost(workshop: Workshop) -> None:
    """A class producer's call is the group's, so each of its checkpoints has the turns of all of them."""
    code = """
async def saves(task, engine):
    chat = engine.chat(task)
    if not chat.turns:
        await chat.generate()
    await chat.save()
    return chat.episode()


class Groups:
    async def rollout(self, task, context):
        from streamrl.producers.functions import FunctionProducer
        given = await FunctionProducer(saves).rollout(task, context)
        tell("saved")
        if len((FOLDER / "saved").read_text().splitlines()) < 4:
            os._exit(1)
        return given
"""
    kept: dict[int, bytes] = {}

    async def store(rollout: int, data: bytes) -> None:
        kept[rollout] = data

    [group] = await workshop.played(code, workshop.task(), keeping=Keeping(store=store), producer="Groups")
    assert ends(group) == {0: "episode", 1: "episode", 2: "episode"}
    num_turns = {rollout: len(unpack(data)[1]) for rollout, data in kept.items()}
    assert max(num_turns.values()) <= 3, num_turns


def test_a_checkpoint_from_before_turns_were_recorded_is_read() -> None:
    answer = Segment((5, 6), (-0.5, -0.25), (VersionSpan(2, Version(0, 3)),))
    chat = SavedChat(
        segments=(Segment((1, 2)), answer), turns=(), finish_reason="stop", mode=LogprobMode.SAMPLED, engine="e", started_s=0.0
    )
    stored = b"streamrl-chats-1\n" + zlib.compress(msgspec.msgpack.encode({0: chat}), 1)
    data, turns = unpack(stored)
    assert data == stored and [turn.part(0, 2) for turn in turns] == [answer]
    assert unpack(b"the user's own") == (b"the user's own", [])
    again = Recorded(answer)
    assert unpack(pack(b"mine", [again]))[1][0].part(1, 2) == Segment((6,), (-0.25,), (VersionSpan(1, Version(0, 3)),))


async def test_attempts_are_counted_by_several_and_removed(bus: Bus) -> None:
    mine, other = Attempts(bus), Attempts(bus)
    assert [await mine.load(4), await mine.add(4), await other.add(4), await mine.add(4)] == [0, 1, 2, 3]
    assert [await other.add(41), await Attempts(bus).load(4)] == [1, 3]
    await mine.forget(4)
    assert [await Attempts(bus).load(4), await Attempts(bus).load(41)] == [0, 1]
    assert await other.add(4) == 1
    assert all(key.startswith(PREFIX_ATTEMPTS) for key in await bus.kv.keys("attempts"))


@pytest.mark.process
async def test_deaths_of_earlier_deliveries_count(workshop: Workshop) -> None:
    code = """
async def deadly(task, engine):
    tell("struck")
    os._exit(7)
"""
    counted = 2

    async def died() -> int:
        nonlocal counted
        counted += 1
        return counted

    [group] = await workshop.played(code, workshop.task(), keeping=Keeping(attempts=2, died=died), producer="deadly")
    assert counted == 4
    assert {failure.reason for failure in group.failures} == {"deliveries"}
    # It has killed two that ran it alone: nobody shares a process with it any more.
    assert len({pid for pid, *_ in workshop.told("struck")}) == 2


@pytest.mark.process
async def test_a_cancelled_task_asks_engines_for_nothing_more(workshop: Workshop) -> None:
    code = """
async def stubborn(task, engine):
    try:
        await engine.chat(task).generate()
    finally:
        tell("ended")
"""
    async with workshop.runner(code, producer="stubborn") as runner:
        rolling = asyncio.create_task(runner.run(workshop.task(min_version=99)))
        while (await workshop.engine.info()).waiting < 3:
            await asyncio.sleep(0.01)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        while (await workshop.engine.info()).waiting:
            await asyncio.sleep(0.01)
        await until(lambda: len(workshop.told("ended")) >= 3)
