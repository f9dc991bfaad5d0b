"""A sample stream written by hand: every call appends one record, `Fold` folds it at once."""

from collections.abc import Sequence

from streamrl.core.fold import Batch, Effects, close, fold, trained
from streamrl.core.records import Ended, Marked, Poison, Record, Rewarded, Rollouts, RolloutView
from streamrl.core.state import FoldConfig, FoldState, initial_state


def view(
    rollout: int,
    *,
    oldest: int = 0,
    newest: int | None = None,
    highest: int | None = None,
    reward: float | None = None,
    tokens: int = 3,
    samples: int = 1,
    grading: int = 0,
) -> RolloutView:
    newest = oldest if newest is None else newest
    return RolloutView(rollout, samples, tokens, oldest, newest, reward, newest if highest is None else highest, grading=grading)


def config(batch: int = 2, staleness: int = 1, **options: object) -> FoldConfig:
    return FoldConfig(batch_tasks=batch, max_staleness=staleness, **options)  # type: ignore[arg-type]


class Stream:
    """Numbers records and folds them into `state`."""

    def __init__(self, config: FoldConfig, state: FoldState | None = None) -> None:
        self.config = config
        self.state = initial_state(config) if state is None else state
        self.sequence = self.state.cursor
        self.effects = Effects()

    def put(self, record: Record) -> Effects:
        self.state, self.effects = fold(self.state, record, self.config)
        return self.effects

    def next(self) -> int:
        self.sequence += 1
        return self.sequence

    def rollouts(self, task: int, *views: RolloutView, group: int = 2, source: str = "main") -> Effects:
        return self.put(Rollouts(self.next(), source, task, group, views))

    def group(self, task: int, rewards: Sequence[float] = (0.0, 1.0), *, oldest: int = 0, newest: int | None = None) -> Effects:
        views = [view(k, oldest=oldest, newest=newest, reward=reward) for k, reward in enumerate(rewards)]
        return self.rollouts(task, *views, group=len(rewards))

    def demonstration(self, task: int) -> Effects:
        return self.rollouts(task, view(0, oldest=-1), group=1, source="warmup")

    def end(self, task: int, rollout: int | None = None, *, group: int = 2, reason: str = "failed", grading: int = 0) -> Effects:
        return self.put(Ended(self.next(), "main", task, rollout, group, reason, "said the producer", grading))

    def reward(self, task: int, rollout: int, reward: float, revision: int = 1, *, grading: int = 0) -> Effects:
        return self.put(Rewarded(self.next(), task, rollout, reward, revision, grading=grading))

    def poison(self, task: int | None) -> Effects:
        return self.put(Poison(self.next(), task, "unreadable"))

    def mark(self) -> Effects:
        return self.put(Marked(self.next(), "note"))

    def close(self) -> Batch | None:
        return close(self.state, self.config)

    def train(self, *, warm: bool = True, score: float = 0.0) -> Batch:
        batch = self.close()
        assert batch is not None, f"expected a batch, {self.state.ready} groups are ready"
        self.state = trained(self.state, batch, self.config, warm=warm, score=score)
        return batch

    @property
    def dropped(self) -> list[tuple[int, int, tuple[int, ...], str, bool]]:
        """(sequence, task, rollouts, reason, retires) of the drops since the last batch."""
        return [(d.sequence, d.task, d.rollouts, d.reason, d.retires) for d in self.state.drops]


def tasks_of(batch: Batch | None) -> tuple[int, ...] | None:
    return None if batch is None else tuple(group.task for group in batch.groups)
