"""What the headers of a message are worth: the digest first."""

from __future__ import annotations

import pytest

from streamrl.core.records import Ended, Forked, Poison, Rewarded, Rollouts, judge
from streamrl.schemas.codec import encode
from streamrl.schemas.columns import SCHEMA_NAME
from streamrl.schemas.digests import body_digest
from streamrl.schemas.ledger import REASON_LENGTH
from streamrl.schemas.samples import MARK_EPOCH, Mark, RewardUpdate, Tombstone
from tests.support.bad_messages import SUBJECTS, broken_tables, patched, template

BODY = patched(template((0, 1)), 4, 0)
SAMPLES = SUBJECTS.samples("main")


def test_a_digest_that_fits_is_no_news() -> None:
    record, batch = judge(SAMPLES, 1, BODY, "4", digest=body_digest(BODY), schema=SCHEMA_NAME)
    assert isinstance(record, Rollouts) and batch is not None and record.task == 4
    changed = bytearray(BODY)
    changed[-100] ^= 1
    assert isinstance(judge(SAMPLES, 1, bytes(changed), "4", digest=body_digest(BODY))[0], Poison), "one bit is enough"


@pytest.mark.parametrize("digest", [body_digest(b""), "", "x", body_digest(BODY).upper(), "a" * 100_000])
def test_a_digest_that_does_not_fit_quarantines_and_ends_the_task(digest: str) -> None:
    record, batch = judge(SAMPLES, 1, BODY, "4", digest=digest)
    assert isinstance(record, Poison) and batch is None and record.task == 4
    assert "digest" in record.reason and len(record.reason) <= REASON_LENGTH


def test_the_body_is_believed_before_the_header_when_its_digest_fits() -> None:
    assert judge(SAMPLES, 1, BODY, "9", digest=body_digest(BODY))[0].task == 4  # type: ignore[union-attr]
    assert judge(SAMPLES, 1, BODY, "9")[0].task == 9  # type: ignore[union-attr]


def test_a_foreign_schema_is_named_by_header_or_body() -> None:
    record, _ = judge(SAMPLES, 1, BODY, "4", schema="samples/3")
    assert isinstance(record, Poison) and "got 'samples/3' (header)" in record.reason
    record, _ = judge(SAMPLES, 1, broken_tables()["foreign schema"], None)
    assert isinstance(record, Poison) and "got samples/9" in record.reason


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("log-prob is NaN", "finite log-probs"),
        ("mask longer than tokens", "equal lengths"),
        ("spans too short", "cover every token"),
        ("column missing", "missing or of another type: ['logprobs']"),
    ],
)
def test_arrow_that_is_no_sample(name: str, says: str) -> None:
    record, _ = judge(SAMPLES, 1, patched(broken_tables()[name], 4, 0), "4")
    assert isinstance(record, Poison) and says in record.reason and record.task == 4


def test_text_that_is_no_text_nesting_without_end_and_long_stories() -> None:
    broken = encode(RewardUpdate(task=1, rollout=0, reward=0.5)).replace(b"rollout", b"roll\xfft")
    deep = b"\x83\xa4kind\xa4mark\xa4name\xa1x\xa6detail" + b"\x81\xa1a" * 100_000
    for subject, body in ((SUBJECTS.rewards, broken), (SUBJECTS.marks, deep)):
        assert isinstance(judge(subject, 1, body, None)[0], Poison)
    record, _ = judge(SUBJECTS.tombstones("main"), 1, encode(Tombstone(task=1, reason="r" * 9999, detail="d" * 9999)), None)
    assert isinstance(record, Ended) and len(record.reason) == len(record.detail) == REASON_LENGTH


@pytest.mark.parametrize("wrong", [{"revision": 0}, {"rollout": -1}, {"task": -1}, {"sample": -2}, {"reward": float("inf")}])
def test_rewards_out_of_range(wrong: dict[str, int]) -> None:
    good = {"task": 1, "rollout": 0, "reward": 0.5, "revision": 2, "sample": 3}
    record, _ = judge(SUBJECTS.rewards, 1, encode(RewardUpdate(**good)), None)  # type: ignore[arg-type]
    assert record == Rewarded(1, 1, 0, 0.5, 2, 3)
    assert isinstance(judge(SUBJECTS.rewards, 1, encode(RewardUpdate(**good | wrong)), "1")[0], Poison)  # type: ignore[arg-type]


def test_epoch_marks() -> None:
    def mark(**detail: object) -> bytes:
        return encode(Mark(name=MARK_EPOCH, detail=detail))

    assert judge(SUBJECTS.marks, 7, mark(epoch=1, first=3, last_before=5), None) == (Forked(7, 1, 3, 5), None)
    assert judge(SUBJECTS.marks, 7, mark(epoch=1, first=6, last_before=5), None) == (Forked(7, 1, 6, 5), None)  # on another mesh
    for wrong in ({"epoch": 0}, {"first": -1}, {"first": 7}, {"epoch": "1"}):
        body = mark(**{"epoch": 1, "first": 3, "last_before": 5} | wrong)
        assert isinstance(judge(SUBJECTS.marks, 7, body, None)[0], Poison)
    assert isinstance(judge(SUBJECTS.marks, 7, mark(), None)[0], Poison)
