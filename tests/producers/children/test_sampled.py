"""Where the tokens of an episode were sampled: whole turns, parts of turns, several in one segment; in time linear in their number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from streamrl.errors import SchemaError
from streamrl.producers.children.remote import Heard
from streamrl.producers.children.sampled import Sampled
from streamrl.producers.episode import Segment
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.versions import Version


def model(token_ids: Sequence[int], logprobs: Sequence[float], version: int = 0) -> Segment:
    return Segment(tuple(token_ids), tuple(logprobs), (VersionSpan(len(token_ids), Version(0, version)),))


def alike(token_ids: Sequence[int], version: int = 0) -> Segment:
    """All tokens as probable, so that they are told apart by their ids alone."""
    return model(token_ids, [-0.5] * len(token_ids), version)


def sampled(*turns: Segment) -> Sampled:
    return Sampled([Heard(turn) for turn in turns])


def test_parts_of_turns_are_found() -> None:
    for token_ids, parts in (
        ([1, 2, 3], ((0, 0, 3),)),
        ([2, 3], ((0, 1, 3),)),
        ([3, 1], ((1, 0, 2),)),
        ([1, 2, 3, 3, 1, 2], ((0, 0, 3), (1, 0, 3))),
        # The longest first: 1 2 3, not 1 2, of turn 0; then the end of turn 1.
        ([1, 2, 3, 1, 2], ((0, 0, 3), (0, 0, 2))),
        ([2, 3, 3, 1], ((0, 1, 3), (1, 0, 2))),
        ([2, 2, 2, 2], ((2, 0, 3), (0, 1, 2))),
        ([], ((3, 0, 0),)),
    ):
        given = sampled(alike([1, 2, 3]), alike([3, 1, 2]), alike([2, 2, 2]), alike([]))
        assert given.parts_of(alike(token_ids)) == parts


def test_no_part_goes_from_one_turn_into_the_next() -> None:
    given = sampled(alike([1, 2]), alike([3, 4]))
    assert given.parts_of(alike([2, 3])) == ((0, 1, 2), (1, 0, 1))


def test_of_equal_turns_the_one_with_equal_versions_is_meant() -> None:
    given = sampled(alike([1, 2], version=3), alike([1, 2], version=4))
    assert given.parts_of(alike([1, 2], version=4)) == ((1, 0, 2),)
    assert given.parts_of(alike([1, 2], version=9)) == ((0, 0, 2),)


@pytest.mark.parametrize(
    "forged", [alike([1, 2, 9]), model([1, 2], [-0.5, -0.25]), model([1, 2], [-0.5]), model([1, 2], [-0.5, float("nan")])]
)
def test_what_was_not_sampled_is_refused(forged: Segment) -> None:
    with pytest.raises(SchemaError, match="not sampled by an engine"):
        sampled(alike([1, 2, 3])).parts_of(forged)


def test_without_turns_nothing_was_sampled() -> None:
    with pytest.raises(SchemaError, match="token 0 of 1"):
        sampled().parts_of(alike([1]))


class Counted(int):
    """A token that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) == other

    def __ne__(self, other: object) -> bool:
        Counted.comparisons += 1
        return int(self) != other

    __hash__ = int.__hash__


@pytest.mark.parametrize("num_ids", [1, 2, 1000], ids=["equal", "two", "different"])
@pytest.mark.parametrize("cut", [0, 1])
def test_each_token_is_looked_up_a_few_times_however_many_there_are(num_ids: int, cut: int) -> None:
    """Turn by turn, each without its first token (or whole), and all of them in one segment."""
    turns = [alike([Counted(11 * (turn * 8 + place) % num_ids) for place in range(8)]) for turn in range(500)]
    given = sampled(*turns)
    Counted.comparisons = 0
    for turn in turns:
        given.parts_of(alike(turn.token_ids[cut:]))
    given.parts_of(alike([token for turn in turns for token in turn.token_ids[cut:]]))
    assert Counted.comparisons <= 20 * 500 * 8
