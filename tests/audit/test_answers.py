"""The audit of what agents were told: a good session passes, and each broken promise is found and named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from streamrl.schemas.codec import encode
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import Subjects
from tests.support.audit.answers import Answer, Row, Sessions, check, read_sessions
from tests.support.audit.forge import rows
from tests.support.audit.raw import Stored

PLACE = (4, 1)
PROMPT = (1, 2, 3)


def answer(prompt: tuple[int, ...], *ids: int) -> Answer:
    return Answer(*PLACE, prompt, ids, tuple(-0.5 * token for token in ids), tuple((0, 7) for _ in ids))


FIRST = answer(PROMPT, 10, 11)
SECOND = answer((*FIRST.whole, 4), 12)
GIVEN_UP = answer((*FIRST.whole, 5), 13)
BRANCH = answer((1, 2, 9), 14, 15)
LAST = answer((*BRANCH.whole, 6), 16)
ANSWERS = [FIRST, GIVEN_UP, SECOND, answer((*SECOND.whole, 4), 17), BRANCH, LAST]
"""A turn, one that was given up, two that go on, and a branch. The last turn of the first strand is not the newest answer: given up too."""


def row(*trained: Answer, masked: tuple[Answer, ...] = ()) -> Row:
    whole = max((one.whole for one in (*trained, *masked)), key=len)
    mask, logprobs, versions = [0] * len(whole), [0.0] * len(whole), [(0, -1)] * len(whole)
    for one in trained:
        place = slice(len(one.prompt), len(one.whole))
        mask[place], logprobs[place], versions[place] = [1] * len(one.ids), one.logprobs, one.versions
    return Row(whole, tuple(mask), tuple(logprobs), tuple(versions))


def good() -> Sessions:
    return Sessions({PLACE: [row(FIRST, SECOND), row(BRANCH, LAST)]})


def test_a_good_session_passes() -> None:
    assert check(good(), ANSWERS, [PLACE], ANSWERS) == []
    assert check(Sessions(), ANSWERS, [PLACE], queued={PLACE[0]}) == []


def bent(how: Callable[[list[Row]], object]) -> Sessions:
    sessions = good()
    how(sessions.rows[PLACE])
    return sessions


LOUDER = replace(SECOND, logprobs=(-6.5,))
NEWER = replace(LAST, versions=((0, 8),))
BENT: dict[str, tuple[Callable[[list[Row]], object], str]] = {
    "a sample is missing": (lambda found: found.pop(), "an answer of 2 tokens is trained in 0 of 0 samples"),
    "a turn is masked": (lambda found: found.__setitem__(0, row(SECOND, masked=(FIRST,))), "trained in 0 of 1 samples"),
    "a turn is trained twice": (lambda found: found.append(row(FIRST)), "an answer of 2 tokens is trained in 2 of 2 samples"),
    "what was given up is trained": (lambda found: found.append(row(GIVEN_UP)), "tokens are trained, its agent was given 6"),
    "another log-prob": (lambda found: found.__setitem__(0, row(FIRST, LOUDER)), r"log-probs (-6.5,) in its sample"),
    "another version": (lambda found: found.__setitem__(1, row(BRANCH, NEWER)), "tokens 6 to 7 are not what an engine gave"),
}


@pytest.mark.parametrize("name", BENT)
def test_a_broken_promise_is_found(name: str) -> None:
    how, says = BENT[name]
    problems = check(bent(how), ANSWERS, [PLACE], ANSWERS)
    assert any(says in problem for problem in problems), problems


def test_a_session_that_was_ended_must_be_on_the_stream() -> None:
    [lost, untold] = check(Sessions(), ANSWERS, [PLACE])
    assert "not on the stream" in lost and "nor a tombstone" in untold
    subjects = Subjects("forged")
    stones = [Tombstone(task=4, reason="timeout", group_size=2), Tombstone(task=5, reason="failed", rollout=0, detail="reward: it raised")]
    messages = [Stored(number, subjects.tombstones("main"), encode(stone), {}, 0.0) for number, stone in enumerate(stones)]
    sessions = read_sessions(messages)
    [wrong] = check(sessions, [], [PLACE, (5, 0)])
    assert "4.1" in wrong and "timeout" in wrong


def test_two_contents_of_one_rollout_are_found() -> None:
    subject = Subjects("forged").samples("main")
    messages = [Stored(number, subject, rows(4, (0, 1), first=number), {}, 0.0) for number in range(2)]
    sessions = read_sessions(messages, producer="")
    assert len(sessions.rows[4, 1]) == 1 and sum(sessions.rows[4, 1][0].mask) == 2
    assert [one for one in sessions.problems if one.startswith("task 4 rollout 1 ")] != []
    assert read_sessions(messages).rows == {}, "what others than gateways have made is none of agents'"
