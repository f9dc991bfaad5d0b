from __future__ import annotations

import asyncio

from streamrl.core.lengths import histogram
from streamrl.producers.slots import FREE, Cut, Slot, phase, stored, taken
from streamrl.telemetry.clock import StateClock


class Hand:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def at_once() -> None:
    pass


def test_a_slot_with_a_request_generates_whatever_its_task_does() -> None:
    hand = Hand()
    clock = StateClock(FREE, slots=2, now=hand)
    slot = Slot(clock, at_once)
    hand.now_s = 1.0
    slot.enter("tools")
    slot.waits(+1)
    hand.now_s = 3.0
    slot.waits(-1)
    slot.asks(+2)
    hand.now_s = 6.0
    slot.waits(+1)
    slot.asks(-1)
    hand.now_s = 10.0
    slot.asks(-1)
    hand.now_s = 11.0
    slot.waits(-1)
    hand.now_s = 13.0
    slot.enter(FREE)
    hand.now_s = 14.0
    assert clock.take() == {FREE: 14.0 + 1.0 + 1.0, "tools": 2.0, "wait_engine": 2.0 + 1.0, "generate": 7.0}


async def test_tasks_that_run_beside_each_other_have_slots_of_their_own() -> None:
    hand = Hand()
    clock = StateClock(FREE, slots=3, now=hand)
    there, go = asyncio.Event(), asyncio.Event()

    async def one(name: str) -> None:
        with taken(clock, at_once, Cut()), phase(name):
            there.set()
            await go.wait()

    async with asyncio.TaskGroup() as group:
        group.create_task(one("reward"))
        group.create_task(one("wait_room"))
        await there.wait()
        await asyncio.sleep(0)
        hand.now_s = 5.0
        go.set()
    assert clock.take() == {FREE: 5.0, "reward": 5.0, "wait_room": 5.0, "tools": 0.0}
    hand.now_s = 6.0
    assert clock.take()[FREE] == 3.0, "all are free again"


def spent(cut: Cut, heard: list[int], kept: list[int]) -> None:
    with taken(StateClock(FREE), at_once, cut) as slot:
        slot.heard += heard
        stored(kept)


def test_tokens_that_a_task_was_given_and_did_not_store_are_cut() -> None:
    cut = Cut()
    spent(cut, [5, 90, 7, 5], [7, 5])
    assert cut.take() == (95, histogram([5, 90]))
    assert cut.take() == (0, ())


def test_a_task_that_went_on_from_a_checkpoint_stores_what_an_earlier_attempt_has_cut() -> None:
    cut = Cut()
    spent(cut, [30], [])
    assert cut.take() == (30, histogram([30]))
    spent(cut, [10], [30, 10])
    assert cut.take() == (0, ())
    spent(cut, [50], [])
    assert cut.take() == (20, histogram([50])), "30 have been stored after all"
