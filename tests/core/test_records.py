"""From stored messages to records: never an exception, and the numbers that decisions need."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.core.records import AgentView, Ended, Forked, Marked, Poison, Rewarded, Rollouts, RolloutView, Share, judge
from streamrl.core.repetition import Tails
from streamrl.schemas.codec import encode
from streamrl.schemas.columns import FORMER_NAME, SCHEMA_NAME
from streamrl.schemas.digests import body_digest
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.ledger import REASON_LENGTH
from streamrl.schemas.samples import MARK_EPOCH, LogprobMode, Mark, RewardUpdate, Sample, Status, Tombstone, VersionSpan
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from tests.support.rows import sample

SUBJECTS = Subjects("run")
SAMPLES = SUBJECTS.samples("main")
TOMBSTONES = SUBJECTS.tombstones("main")


def views_of(*rows: Sample) -> tuple[RolloutView, ...]:
    record, _ = judge(SAMPLES, 1, encode_samples(list(rows)), None)
    assert isinstance(record, Rollouts)
    return record.rollouts


def numbered(first: int, *numbers: int) -> tuple[VersionSpan, ...]:
    """Make spans: so many tokens without a version, then one token of each."""
    return (VersionSpan(first, None), *(VersionSpan(1, Version(0, number)) for number in numbers))


def test_samples_become_one_view_a_rollout() -> None:
    two = [sample(1, sample=k, num_samples=2) for k in range(2)]
    record, batch = judge(SAMPLES, 9, encode_samples([*two, sample(0, reward=None)]), "3")
    at = ((0, 4, 4),)
    assert batch is not None and batch.num_rows == 3
    views = (RolloutView(0, 1, 2, 4, 4, None, 4, at), RolloutView(1, 2, 4, 4, 4, 1.0, 4, at))
    assert record == Rollouts(9, "main", 3, 2, views, 8, 4, Tails(batch))


@pytest.mark.parametrize("seed", range(20))
def test_views_are_what_a_look_at_every_token_gives(seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = []
    for rollout, num_samples in enumerate(random.integers(1, 4, 3)):
        for index in range(num_samples):
            lengths = [1, *random.integers(1, 6, random.integers(1, 6)).tolist()]
            versions = [None, *(Version(int(e), int(n)) if n else None for e, n in random.integers(0, 4, (len(lengths) - 1, 2)))]
            total = sum(lengths)
            mask = (random.random(total) < 0.5).astype(np.uint8)
            mask[0] = 0
            spans = tuple(map(VersionSpan, lengths, versions))
            columns = {"tokens": random.integers(0, 99, total, dtype=np.int32), "logprobs": np.full(total, -0.5, np.float32)}
            shape = {"rollout": rollout, "sample": index, "num_samples": int(num_samples), "group_size": 3}
            rows.append(sample(**shape, **columns, loss_mask=mask, spans=spans, logprob_mode=LogprobMode.NONE))
    record, batch = judge(SAMPLES, 1, encode_samples(rows), None)
    assert isinstance(record, Rollouts) and batch is not None
    for view in record.rollouts:
        tokens = [
            (trained, version)
            for row in rows
            if row.rollout == view.rollout
            for trained, version in zip(row.loss_mask, [span.version for span in row.spans for _ in range(span.length)], strict=True)
        ]
        learned = [version.number for trained, version in tokens if trained and version]
        made = [version for _, version in tokens if version]
        assert view.num_tokens == sum(trained for trained, _ in tokens)
        assert (view.oldest, view.newest) == (min(learned, default=-1), max(learned, default=-1))
        assert view.highest == max((version.number for version in made), default=-1)
        by_epoch = {epoch: [v.number for v in made if v.epoch == epoch] for epoch in sorted({v.epoch for v in made})}
        assert view.epochs == tuple((epoch, min(numbers), max(numbers)) for epoch, numbers in by_epoch.items())
        assert view.num_samples == sum(row.rollout == view.rollout for row in rows)
    assert record.top_token == max(int(row.tokens.max()) for row in rows)


def test_no_version_is_no_demonstration_unless_it_is_trained() -> None:
    row = sample(0, spans=(VersionSpan(4, None),), logprob_mode=LogprobMode.NONE, logprobs=np.zeros(4, np.float32), reward=None)
    (view,) = views_of(row)
    assert view == RolloutView(0, 1, 2, -1, -1, None, -1)
    assert view.demonstration
    (view,) = views_of(sample(0, loss_mask=np.zeros(4, np.uint8)))
    assert view == RolloutView(0, 1, 0, -1, -1, 0.0, 4, ((0, 4, 4),))
    assert not view.demonstration


def test_the_other_kinds_and_what_a_record_does_not_say() -> None:
    stone = Tombstone(task=4, reason="failed", rollout=1, group_size=2, detail="x", source="main")
    assert judge(TOMBSTONES, 1, encode(stone), None) == (Ended(1, "main", 4, 1, 2, "failed", "x"), None)
    assert judge(SUBJECTS.rewards, 2, encode(RewardUpdate(task=4, rollout=1, reward=0.5)), None) == (Rewarded(2, 4, 1, 0.5, 1), None)
    assert judge(SUBJECTS.marks, 3, encode(Mark(name="drain")), None) == (Marked(3, "drain"), None)
    assert RolloutView(0, 1, 2, 3, 4, None) == RolloutView(0, 1, 2, 3, 4, None, highest=-1, epochs=())
    assert RolloutView(0, 1, 2, 3, 4, None).grading == Rollouts(1, "main", 0, 2, ()).longest == Rollouts(1, "main", 0, 2, ()).top_token == 0
    assert Ended(1, "main", 0, None, 2, "failed").detail == ""
    assert Rewarded(1, 0, 0, 0.5, 1).sample is None


@pytest.mark.parametrize(
    ("subject", "body", "header", "task", "says"),
    [
        (SAMPLES, b"junk", "12", 12, "Arrow stream of samples/2 at run.samples.main sequence 5"),
        (SAMPLES, b"junk", None, None, "Arrow"),
        (SAMPLES, encode_samples([sample(0)]), "4", 4, "task 4 .header.* got task 3"),
        (TOMBSTONES, b"junk", "12", 12, "Tombstone"),
        (TOMBSTONES, encode(Tombstone(task=1, reason="x", rollout=3, group_size=2)), "1", 1, "below the group size"),
        (TOMBSTONES, encode(Tombstone(task=1, reason="x", group_size=0)), "1", 1, "below the group size"),
        (SUBJECTS.rewards, b"junk", "12", None, "RewardUpdate"),
        (SUBJECTS.rewards, encode(RewardUpdate(task=1, rollout=0, reward=float("nan"))), "1", None, "finite reward"),
        (SUBJECTS.marks, b"junk", "12", None, "Mark"),
        ("run.unknown", b"", "12", 12, "unknown"),
        ("run", b"", "12", 12, "expected samples"),
    ],
)
def test_what_cannot_be_read_is_poison(subject: str, body: bytes, header: str | None, task: int | None, says: str) -> None:
    record, batch = judge(subject, 5, body, header)
    assert isinstance(record, Poison) and batch is None
    assert (record.sequence, record.task) == (5, task)
    assert re.search(says, record.reason)
    assert body != b"junk" or f"at {subject} sequence 5" in record.reason


@pytest.mark.parametrize("header", ["", "-1", "1.5", "abc", "²", "٣", "9" * 19, "1" * 5000, " 1", "1\n"])
def test_a_broken_header_names_no_task(header: str) -> None:
    assert judge(SAMPLES, 1, b"junk", header)[0].task is None  # type: ignore[union-attr]


@given(
    body=st.binary(max_size=100),
    header=st.none() | st.text(max_size=6),
    kind=st.sampled_from(["samples.main", "tombstones.x", "rewards", "marks", "odd"]),
)
def test_judge_never_raises(body: bytes, header: str | None, kind: str) -> None:
    assert judge(f"run.{kind}", 1, body, header)[0].sequence == 1


def test_version_zero_is_a_version() -> None:
    rows = [
        sample(0, num_samples=2, spans=numbered(2, 0, 0)),
        sample(0, sample=1, num_samples=2, spans=numbered(2, 2, 5)),
        sample(1, spans=numbered(2, 0, 0)),
    ]
    assert views_of(*rows) == (RolloutView(0, 2, 4, 0, 5, 0.0, 5, ((0, 0, 5),)), RolloutView(1, 1, 2, 0, 0, 1.0, 0, ((0, 0, 0),)))


@pytest.mark.parametrize(
    ("tokens", "oldest", "is_one"), [(0, -1, False), (1, -1, True), (3, -1, True), (1, 0, False), (3, 4, False), (0, 0, False)]
)
def test_a_demonstration_is_trained_on_and_sampled_by_no_model(tokens: int, oldest: int, is_one: bool) -> None:
    assert RolloutView(0, 1, tokens, oldest, oldest, None).demonstration == is_one


@pytest.mark.parametrize(
    ("task", "rollout", "group_size", "good"),
    [(0, None, 1, True), (0, 0, 1, True), (3, 1, 2, True), (-1, None, 1, False), (0, 1, 1, False), (0, 2, 2, False), (0, -1, 2, False)],
)
def test_tombstones_of_tasks_and_rollouts_that_can_be(task: int, rollout: int | None, group_size: int, good: bool) -> None:
    record, _ = judge(TOMBSTONES, 1, encode(Tombstone(task=task, reason="x", rollout=rollout, group_size=group_size)), "8")
    assert record == Ended(1, "", task, rollout, group_size, "x") if good else isinstance(record, Poison) and record.task == 8


def test_reasons_are_cut_as_ever() -> None:
    # A replay compares drops with those of the ledger, their details included: another length would make it differ.
    long = Tombstone(task=1, reason="r" * 9999, detail="d" * 9999)
    assert judge(TOMBSTONES, 1, encode(long), None) == (Ended(1, "", 1, None, 1, "r" * 400, "d" * 400), None)
    record, _ = judge(TOMBSTONES, 1, encode(Tombstone(task=-1, reason="r" * 9999)), None)
    assert isinstance(record, Poison) and len(record.reason) == 400


def test_shares_are_of_cut_rollouts_and_take_their_ages_along() -> None:
    cut, shown = {"status": Status.TRUNCATED}, {"logprob_mode": LogprobMode.NONE, "logprobs": np.zeros(4, np.float32)}
    whole, one = views_of(sample(0), sample(1, **cut, spans=numbered(2, 3, 0)))
    assert (whole.shares, one.shares) == ((), (Share(False, True, 2, 0, 3),))
    one, whole = views_of(sample(0, **cut, **shown, spans=numbered(3, 3)), sample(1))
    assert (one.shares, whole.shares) == ((Share(False, True, 2, 3, 3),), ()), "a token that no model sampled has no age"
    assert views_of(sample(0, **cut, **shown, spans=numbered(4)))[0].shares == (Share(False, True, 2, -1, -1),)
    shares = (Share(False, False, 1, -1, -1), Share(False, True, 2, 3, 5), Share(True, False, 4, 0, 4))
    given = RolloutView(0, 1, 7, 0, 5, 1.0, shares=shares)
    for inexact, truncated, left in [
        (False, False, (7, 0, 5)),
        (True, False, (3, 3, 5)),
        (False, True, (5, 0, 4)),
        (True, True, (1, -1, -1)),
    ]:
        found = given.without(inexact=inexact, truncated=truncated)
        assert (found.num_tokens, found.oldest, found.newest) == left


def test_agents_are_in_order_and_the_longest_sample_is_known() -> None:
    owners = [(2, "a/1"), (1, "b"), (0, "a/1")]
    rows = [sample(0, sample=index, num_samples=3, agent=agent, agent_reward=0.5) for index, agent in owners]
    assert views_of(*rows[1:], rows[0])[0].agents == (AgentView("a/1", (0, 2), 0.5), AgentView("b", (1,), 0.5))
    assert views_of(*rows)[0].agents == (AgentView("a/1", (0, 2), 0.5), AgentView("b", (1,), 0.5))
    short = {"tokens": np.array([5, 6], np.int32), "loss_mask": np.array([0, 1], np.uint8), "logprobs": np.zeros(2, np.float32)}
    record, _ = judge(SAMPLES, 1, encode_samples([sample(0, **short, spans=numbered(1, 4)), sample(1, grading=7, reward=None)]), None)
    assert isinstance(record, Rollouts) and record.longest == 4
    assert [one.grading for one in record.rollouts] == [0, 7]


@pytest.mark.parametrize(("grading", "good"), [(-1, False), (0, False), (1, True), ((1 << 63) - 1, True), (1 << 63, False)])
def test_gradings_that_can_be(grading: int, good: bool) -> None:
    stone = Tombstone(task=4, reason="failed", rollout=1, group_size=2, grading=grading)
    record, _ = judge(TOMBSTONES, 1, encode(stone), "4")
    assert record == Ended(1, "", 4, 1, 2, "failed", grading=grading) if good else isinstance(record, Poison)
    record, _ = judge(SUBJECTS.rewards, 2, encode(RewardUpdate(task=4, rollout=1, reward=0.5, grading=grading)), None)
    assert record == Rewarded(2, 4, 1, 0.5, 1, grading=grading) if good else isinstance(record, Poison)
    assert isinstance(judge(TOMBSTONES, 1, encode(Tombstone(task=4, reason="failed", grading=7)), "4")[0], Poison), "it is of no rollout"


@pytest.mark.parametrize(("schema", "good"), [(SCHEMA_NAME, True), (FORMER_NAME, True), (None, True), ("other", False)])
def test_schemas_that_are_read(schema: str | None, good: bool) -> None:
    assert (judge(SAMPLES, 1, encode_samples([sample(0)]), None, schema=schema)[1] is not None) == good


def test_only_what_a_model_drew_has_to_be_marked_as_inexact() -> None:
    drawn, shown = Sampling(regex="a"), {"logprob_mode": LogprobMode.NONE, "logprobs": np.zeros(4, np.float32)}
    assert views_of(sample(0, sampling=drawn, **shown, spans=numbered(4)))[0].demonstration
    assert isinstance(judge(SAMPLES, 1, encode_samples([sample(0, sampling=drawn, spans=numbered(2, 0, 0))]), None)[0], Poison)


BODY = encode_samples([sample(k, task=4) for k in range(2)])


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


def test_text_that_is_no_text_and_nesting_without_end_are_poison() -> None:
    broken = encode(RewardUpdate(task=1, rollout=0, reward=0.5)).replace(b"rollout", b"roll\xfft")
    deep = b"\x83\xa4kind\xa4mark\xa4name\xa1x\xa6detail" + b"\x81\xa1a" * 100_000
    for subject, body in ((SUBJECTS.rewards, broken), (SUBJECTS.marks, deep)):
        assert isinstance(judge(subject, 1, body, None)[0], Poison)


@pytest.mark.parametrize("wrong", [{"revision": 0}, {"rollout": -1}, {"task": -1}, {"sample": -2}, {"reward": float("inf")}])
def test_rewards_out_of_range(wrong: dict[str, int]) -> None:
    good = {"task": 1, "rollout": 0, "reward": 0.5, "revision": 2, "sample": 3}
    record, _ = judge(SUBJECTS.rewards, 1, encode(RewardUpdate(**good)), None)  # type: ignore[arg-type]
    assert record == Rewarded(1, 1, 0, 0.5, 2, 3)
    assert isinstance(judge(SUBJECTS.rewards, 1, encode(RewardUpdate(**good | wrong)), "1")[0], Poison)  # type: ignore[arg-type]


def test_epoch_marks() -> None:
    def mark(**detail: object) -> bytes:
        return encode(Mark(name=MARK_EPOCH, detail=detail))

    for first in (0, 1, 3, 6):  # 6: on another mesh
        assert judge(SUBJECTS.marks, 7, mark(epoch=1, first=first, last_before=5), None) == (Forked(7, 1, first, 5), None)
    for wrong in ({"epoch": 0}, {"first": -1}, {"first": 7}, {"epoch": "1"}):
        body = mark(**{"epoch": 1, "first": 3, "last_before": 5} | wrong)
        assert isinstance(judge(SUBJECTS.marks, 7, body, None)[0], Poison)
    assert isinstance(judge(SUBJECTS.marks, 7, mark(), None)[0], Poison)
