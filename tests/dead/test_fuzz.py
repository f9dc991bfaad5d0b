"""Many messages, most of them mutated, through `judge`, `fold` and `close`: every one has one fate, every task one end."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest

from streamrl.core.fold import Batch, close, fold, trained
from streamrl.core.records import Ended, Poison, Rewarded, Rollouts, judge
from streamrl.core.state import FoldConfig, FoldState, initial_state
from streamrl.schemas.codec import encode
from streamrl.schemas.ledger import Drop
from streamrl.schemas.samples import Tombstone
from streamrl.schemas.subjects import HEADER_DIGEST, HEADER_SCHEMA, HEADER_TASK
from tests.support.bad_messages import GROUP, SUBJECTS, Author, Sent, broken_tables

SIZES = [6000, pytest.param(100_000, marks=pytest.mark.soak)]
CONFIG = FoldConfig(batch_tasks=4, group_size=GROUP, max_staleness=3, late_versions=3)
REASONS = (
    *("expected a body with digest", "expected an Arrow stream", "expected sample schema", "expected samples of task"),
    *(
        "expected finite log-probs",
        "expected tokens, loss_mask and l",
        "expected tokens of versions up t",
        "expected tokens of versions that",
    ),
    *("expected a task below", "expected a group of 2", "expected samples, tombstones, re", "expected a Tombstone"),
    *("expected a RewardUpdate", "expected a reward for one of 2 r", "expected a finite reward", "expected an epoch that begins"),
)
"""How the reasons begin that must be met; they are cut after 32 letters."""
WINDOW = (CONFIG.max_staleness + 1) * CONFIG.batch_tasks


@dataclass
class Books:
    """What has become of every message; grows with the messages sent, as a test may, and the state must not."""

    state: FoldState = field(default_factory=lambda: initial_state(CONFIG))
    sent: int = 0
    dead: Counter[str] = field(default_factory=Counter)
    """Quarantined messages by how they were made."""
    reasons: Counter[str] = field(default_factory=Counter)
    fates: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """(sequence, rollout) of every readable sample -> its fates."""
    whole: Counter[int] = field(default_factory=Counter)
    """Drops of whole messages by sequence."""
    ends: Counter[int] = field(default_factory=Counter)
    notes: set[int] = field(default_factory=set)
    """Sequences of readable messages without samples."""
    rewards: Counter[str] = field(default_factory=Counter)
    other: Counter[str] = field(default_factory=Counter)
    largest: int = 0

    def take(self, sent: Sent) -> None:
        """Judge and fold one message, then train whatever batches close."""
        self.sent += 1
        headers = sent.headers
        digest, schema = headers.get(HEADER_DIGEST), headers.get(HEADER_SCHEMA)
        record, batch = judge(sent.subject, self.sent, sent.body, headers.get(HEADER_TASK), digest=digest, schema=schema)
        assert (batch is not None) == isinstance(record, Rollouts)
        before = len(self.state.drops)
        self.state, effects = fold(self.state, record, CONFIG)
        added = self.state.drops[before:]
        if effects.dead:
            assert [letter.sequence for letter in effects.dead] == [self.sent]
            assert [drop for drop in added if drop.sequence == self.sent and drop.reason == "poison" and not drop.rollouts]
            self.dead[sent.kind] += 1
            self.reasons[effects.dead[0].reason[:32]] += 1
        else:
            assert not isinstance(record, Poison)
            match record:
                case Rollouts():
                    self.fates.update({(self.sent, view.rollout): [] for view in record.rollouts})
                case Rewarded():
                    self.notes.add(self.sent)
                    superseded = any(drop.reason == "superseded_reward" and drop.sequence == self.sent for drop in added)
                    self.rewards["dropped" if superseded else "applied"] += 1
                case _:
                    self.notes.add(self.sent)
                    self.other["ended" if isinstance(record, Ended) else "noted"] += 1
        while chosen := close(self.state, CONFIG):
            self.train(chosen)
        self.check()

    def train(self, batch: Batch) -> None:
        for group in batch.groups:
            self.ends[group.task] += 1
            assert all(rollout.reward is not None for rollout in group.rollouts.values())
            for k, rollout in group.rollouts.items():
                self.fates[rollout.sequence, k].append("trained")
        self.settle(self.state.drops)
        self.state = trained(self.state, batch, CONFIG, warm=True)

    def settle(self, drops: tuple[Drop, ...]) -> None:
        for drop in drops:
            self.ends.update([drop.task] if drop.retires else [])
            for k in drop.rollouts:
                if drop.sequence not in self.notes:
                    self.fates[drop.sequence, k].append("dropped")
            self.whole[drop.sequence] += not drop.rollouts

    def check(self) -> None:
        """The state holds no more than its credits allow, whatever is sent."""
        state = self.state
        assert len(state.pending) <= WINDOW and len(state.early_rewards) <= WINDOW * GROUP
        assert state.granted - state.retired == WINDOW
        assert len(state.epochs) == 1
        if self.sent % 1000 == 0:
            self.largest = max(self.largest, len(state.encode()) - sum(len(encode(drop)) for drop in state.drops))


@pytest.mark.parametrize("number", SIZES)
def test_every_message_has_one_fate_and_every_task_one_end(number: int) -> None:
    author, books = Author(7), Books()
    pick = author.random
    while books.sent < number:
        state = books.state
        open_tasks = [task for task in range(state.watermark, state.granted) if task not in state.retired_above]
        task = pick.choice(open_tasks) if pick.random() < 0.9 else pick.randrange(state.granted)
        version = state.version.number
        books.take(author.valid(task, version) if pick.random() < 0.1 else author.mutated(task, version))
    granted = books.state.granted
    for task in range(books.state.watermark, granted):  # nobody sends anything more
        books.take(Sent("end", SUBJECTS.tombstones("main"), encode(Tombstone(task=task, reason="failed", group_size=GROUP))))
    books.settle(books.state.drops)
    assert books.state.pending == {} and books.state.early_rewards == {}
    assert books.ends == dict.fromkeys(range(granted), 1)
    check_fates(books)
    check_variety(books)
    assert books.largest < 20_000, "the state grows with what is open, not with what was sent"


def check_fates(books: Books) -> None:
    """Trained + dropped + dead + taken in as a note = sent."""
    messages: dict[int, str] = {}
    for (sequence, rollout), fates in books.fates.items():
        assert len(fates) + books.whole[sequence] == 1, f"sequence {sequence} rollout {rollout}: {fates}, {books.whole[sequence]}"
        if messages.get(sequence) != "trained":
            messages[sequence] = fates[0] if fates else "dropped"
    counted = Counter(messages.values())
    assert counted["trained"] + counted["dropped"] + books.dead.total() + books.rewards.total() + books.other.total() == books.sent
    assert min(counted["trained"], counted["dropped"], books.rewards["applied"]) > books.sent // 100
    assert min(books.rewards["dropped"], books.other["noted"]) > books.sent // 1000 and books.dead.total() > books.sent // 2


def check_variety(books: Books) -> None:
    """Every kind of poison was met, for its own reason."""
    assert set(books.dead) >= {"bytes", "headers", "subject", "wrong reward", "wrong epoch", "version of the future", "task of the future"}
    assert set(books.dead) >= set(broken_tables())
    reasons = " | ".join(books.reasons)
    for reason in REASONS:
        assert reason in reasons, f"no message was quarantined because it {reason!r}"
