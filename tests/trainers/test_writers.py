"""Ranks that write one checkpoint together: whichever dies at whatever call, it is whole, or the former one is in its place."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.joint import NAME
from tests.support.meshes import slow
from tests.support.preloaded import PRELOADED

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]


async def told(folder: Path, *scenario: str) -> Any:
    code, out, err = await PRELOADED.run("-m", "tests.support.joint", str(folder), *scenario, folder=folder)
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize("former", [slow(""), "old"])
async def test_a_kill_of_either_rank_at_any_call_leaves_one_whole_checkpoint(tmp_path: Path, former: str) -> None:
    seen = await told(tmp_path, "sweep", former)
    by_rank = [[one for one in seen if one["victim"] == victim] for victim in range(2)]
    for victim, ones in enumerate(by_rank):
        assert [one["codes"][victim] for one in ones] == [-signal.SIGKILL] * (len(ones) - 1) + [0]
        afters = [one["after"] for one in ones]
        assert afters[-1] == "new" and set(afters) == {former or None, "new"}
        assert afters == sorted(afters, key=lambda found: found == "new")
        for one in ones:
            assert one["before"] in (one["after"], None)
            assert one["left"] == ([NAME] if one["after"] else [])
    # Rank 1's last two calls tell rank 0 of its files, which are all there by then: without that nothing gets the name.
    assert {one["after"] for one in by_rank[1][:-1]} == {former or None}
    # Rank 0 says that it has not been written, and that a rank has ended.
    assert {one["codes"][0] for one in by_rank[1][:-1]} == {7}


async def test_a_rank_that_does_not_see_the_place_sends_its_part(tmp_path: Path) -> None:
    assert await told(tmp_path, "unseen") == {"codes": [0, 0], "after": "new", "left": []}


@pytest.mark.parametrize("victim", [slow(0), 1])
async def test_a_disk_that_is_full_on_one_rank_fails_the_checkpoint_and_not_the_next(tmp_path: Path, victim: int) -> None:
    found = await told(tmp_path, "full", str(victim))
    assert found["codes"] == [0, 0] and found["after"] == "two"
    said = found["said"]["said-0"]
    assert "No space left" in said and ("rank 1" in said) == (victim == 1)
