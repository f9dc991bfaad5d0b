"""The fold's state: everything a trainer must remember of the stream. It is the extra part of a checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import msgspec
from msgspec.structs import replace

from streamrl.config.filters import FiltersConfig
from streamrl.config.reward import LengthConfig
from streamrl.core.lengths import added, histogram
from streamrl.errors import SchemaError
from streamrl.schemas.control import Grant
from streamrl.schemas.ledger import Drop
from streamrl.schemas.samples import role_of
from streamrl.schemas.versions import Version

DROPS_CHUNK = 256


class FoldConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the configuration that decisions depend on."""

    batch_tasks: int
    """B: groups in a batch."""
    group_size: int = 0
    """Rollouts of a task after the warm-up, whose tasks have one; 0: whatever a task's first message says."""
    baseline: bool = False
    """Whether the last rollout of a task after the warm-up is the greedy one (`RolloutTask.baseline`)."""
    max_staleness: int
    """S: versions."""
    stale: str = "drop"
    """`drop`, `mask` or `wait`."""
    drop_zero_variance: bool = True
    late_versions: int = 0
    """Versions that a complete group waits for its rewards; 0: for ever."""
    warmup_steps: int = 0
    """Longest warm-up in batches; 0: none."""
    warmup_until: float = 1.0
    """The warm-up ends once its smoothed score reaches this."""
    hold_ahead: bool = False
    """Hold credits back while one whole batch is ready (`streamrl.core.pacing`)."""
    delay_versions: int = 0
    """Versions that engines lag on purpose."""
    vocab_size: int = 0
    """Token ids at or above it are impossible; 0: not checked."""
    max_len: int = 0
    """Samples of more tokens are impossible; 0: not checked."""
    inexact: str = "allow"
    """Tokens whose versions are guesses are trained (`allow`) or masked (`mask`), or their rollouts are dropped (`refuse`)."""
    overlong: str = "train"
    """Samples that a length limit truncated are trained (`train`) or masked (`mask`), or their rollouts are dropped (`drop`)."""
    expire_versions: int = 0
    """A task that has rollouts to end this many versions after its grant ends as `expired`; 0: never."""
    overlong_buffer: int = 0
    """Tokens over which the penalty on long answers grows (`streamrl.core.overlong`); 0: none. It changes no decision, only rewards."""
    overlong_penalty: float = 1.0
    overlong_length: int = 0
    """Greatest length of a sample, in sampled tokens; 0: what its sampling says."""
    length: LengthConfig = LengthConfig()
    """What length adds to rewards beside (`streamrl.core.length_rewards`); it changes no decision either."""
    objectives: tuple[str, ...] = ()
    """Parts of the rewards that a trainer is given by name."""
    filters: FiltersConfig = FiltersConfig(min_reward_std=0.0)
    """What else is left out, by lengths, repetition and rewards."""


class PendingAgent(msgspec.Struct, frozen=True):
    """Samples of a rollout that wait for their batch with one agent's own reward."""

    agent: str
    samples: tuple[int, ...]
    reward: float | None
    revision: int = 0


class PendingRollout(msgspec.Struct, frozen=True):
    """A rollout that waits for its group or its batch."""

    sequence: int
    num_samples: int
    num_tokens: int
    oldest: int
    newest: int
    reward: float | None
    revision: int = 0
    arrived: int = 0
    """Version number of the state when it was folded."""
    sampled: int = -1
    """Tokens that a model has sampled for it, those that are masked here included; -1 where an earlier build has not said. See `length`."""
    agents: tuple[PendingAgent, ...] = ()
    """Those with rewards of their own, by name; their samples are not trained on `reward`."""
    grading: int = 0
    """The request for its reward (`streamrl.core.gradings`); 0: there is none."""

    @property
    def demonstration(self) -> bool:
        """Whether it is trained on and no model sampled what is trained."""
        return self.num_tokens > 0 and self.oldest < 0

    @property
    def length(self) -> int:
        """Tokens that a model has sampled for it."""
        return self.sampled if self.sampled >= 0 else 0 if self.demonstration else self.num_tokens

    @property
    def shares(self) -> bool:
        """Whether a sample of it is trained on the rollout's reward: one that is no agent's."""
        return sum(len(agent.samples) for agent in self.agents) < self.num_samples

    @property
    def rewarded(self) -> bool:
        """Whether there is each reward that a sample of it is trained on; a demonstration needs none."""
        return self.demonstration or (
            (self.reward is not None or not self.shares) and all(agent.reward is not None for agent in self.agents)
        )

    @property
    def votes(self) -> Iterator[tuple[str, float]]:
        """The rewards that it takes into the comparisons of its group, each with the role whose rewards it is compared with."""
        if self.reward is not None and self.shares:
            yield "", self.reward
        for agent in self.agents:
            if agent.reward is not None:
                yield role_of(agent.agent), agent.reward

    def revision_of(self, agent: str) -> int:
        """Of the reward that counts: the agent's own, or with an empty name the rollout's."""
        return next((one.revision for one in self.agents if one.agent == agent), self.revision)

    def with_reward(self, reward: float, revision: int, agent: str = "") -> PendingRollout:
        """Another reward of the rollout or, by name, of one of its agents.

        A rollout whose samples are all of agents has the reward of the agent of its last sample, as long as it is given none itself.
        """
        if not agent:
            return replace(self, reward=reward, revision=revision)
        agents = tuple(replace(one, reward=reward, revision=revision) if one.agent == agent else one for one in self.agents)
        last = max(self.agents, key=lambda one: one.samples[-1]).agent
        leads = agent == last and not self.shares and self.revision == 0
        return replace(self, agents=agents, reward=reward if leads else self.reward)


class PendingTask(msgspec.Struct, frozen=True):
    """A task some of whose rollouts have ended. `ended` holds the rollouts that gave no sample."""

    task: int
    source: str
    group_size: int
    rollouts: dict[int, PendingRollout]
    ended: tuple[int, ...] = ()
    baseline: int = -1
    """The greedy rollout (`RolloutTask.baseline`); -1: there is none."""

    @property
    def compared(self) -> dict[int, PendingRollout]:
        """Its rollouts without the baseline."""
        return {k: one for k, one in self.rollouts.items() if k != self.baseline} if self.baseline >= 0 else self.rollouts

    @property
    def baseline_reward(self) -> float | None:
        """Of the greedy rollout, as it came; None: it has none yet, or there is no such rollout."""
        return self.rollouts[self.baseline].reward if self.baseline in self.rollouts else None

    @property
    def complete(self) -> bool:
        """Whether every rollout has ended."""
        return len(self.rollouts) + len(self.ended) >= self.group_size

    @property
    def ready(self) -> bool:
        """Whether it is complete and every sample has its reward (demonstrations need none)."""
        return self.complete and all(r.rewarded for r in self.rollouts.values())

    @property
    def arrived(self) -> int:
        """Version number at which its newest rollout was folded."""
        return max((r.arrived for r in self.rollouts.values()), default=0)

    @property
    def oldest(self) -> int:
        """Lowest version number of its trained tokens; -1 for demonstrations."""
        return min((r.oldest for r in self.rollouts.values() if r.oldest >= 0), default=-1)


class Tally(msgspec.Struct, frozen=True):
    """Answers that were dropped."""

    tokens: int = 0
    """That a model had sampled for them."""
    lengths: tuple[int, ...] = ()
    """See `streamrl.core.lengths`."""


class Epoch(msgspec.Struct, frozen=True):
    """The version numbers that exist under an epoch: from `first` on, to `last` once another epoch has followed it."""

    epoch: int
    first: int
    last: int | None = None


class FoldState(msgspec.Struct, frozen=True, kw_only=True, rename={"newest_drops": "drops"}):
    """Immutable; every decision makes a new one. msgspec encodes it.

    Tasks below `watermark` and in `retired_above` have ended (trained or dropped); `pending` have begun to end; all others are open.
    """

    version: Version = Version()
    """The version the next batch is trained from."""
    cursor: int = 0
    """Sequence of the last folded record of the sample stream."""
    cursor_s: float = 0.0
    """Unix seconds at which the bus stored that record, set by whoever reads it: after a loss another may have its sequence. 0.0: not
    known. No decision looks at it."""
    watermark: int = 0
    retired_above: frozenset[int] = frozenset()
    pending: dict[int, PendingTask] = {}
    ready: int = 0
    """How many of `pending` are ready."""
    granted: int = 0
    grants: tuple[tuple[int, int], ...] = ()
    """(granted, version number at which it was) in rising order, as far back as open tasks need."""
    newest_drops: tuple[Drop, ...] = ()
    """The last of `drops`, about DROPS_CHUNK at most: a tuple that grew with every drop would be copied whole for each."""
    older_drops: tuple[tuple[Drop, ...], ...] = ()
    """Those before them."""
    epochs: tuple[Epoch, ...] = (Epoch(0, 0),)
    """All epochs that the stream's marks have told of, rising from 0 without a gap."""
    lost: int = 0
    """Highest version number that was made and then lost (`streamrl.schemas.ledger.Gap`); 0: none was."""
    early_rewards: dict[str, tuple[int, float]] = {}
    """(revision, reward) of rewards that came before their samples, by `streamrl.core.gradings.key`, in the order in which they came."""
    reward_sum: float = 0.0
    """Sum of the rewards of all rollouts whose group was complete since the last batch, dropped ones too."""
    reward_count: int = 0
    stored_tokens: int = 0
    """Sampled tokens of the messages folded since the last batch; like the next for people and metrics only."""
    dropped: dict[str, Tally] = {}
    """What was dropped since the last batch, by reason."""
    warmup_end: int | None = 0
    """First task after the warm-up; None while the warm-up goes on."""
    warmup_steps: int = 0
    """Batches trained in the warm-up."""
    warmup_score: float = 0.0
    """Smoothed score of the warm-up."""

    @property
    def drops(self) -> tuple[Drop, ...]:
        """Decided since the last batch; the next ledger entry takes them."""
        return self.drops_after(0)

    @property
    def num_drops(self) -> int:
        """How many `drops` there are."""
        return sum(map(len, self.older_drops)) + len(self.newest_drops)

    def drops_after(self, number: int) -> tuple[Drop, ...]:
        """`drops` without the first `number`."""
        if not self.older_drops:
            return self.newest_drops[number:]
        chunks, begin = [self.newest_drops], self.num_drops - len(self.newest_drops)
        for chunk in reversed(self.older_drops):
            if begin <= number:
                break
            chunks.append(chunk)
            begin -= len(chunk)
        return tuple(itertools.chain.from_iterable(reversed(chunks)))[number - begin :]

    def with_drop(self, drop: Drop, lengths: Sequence[int] = ()) -> FoldState:
        """One more of `drops`; `lengths` are those of the answers that it drops, demonstrations left out."""
        if lengths:
            known = self.dropped.get(drop.reason, Tally())
            tally = Tally(known.tokens + sum(lengths), added(known.lengths, histogram(lengths)))
            self = replace(self, dropped={**self.dropped, drop.reason: tally})
        if len(self.newest_drops) < DROPS_CHUNK:
            return replace(self, newest_drops=(*self.newest_drops, drop))
        return replace(self, newest_drops=(drop,), older_drops=(*self.older_drops, self.newest_drops))

    def with_epoch(self, epoch: int, first: int, last_before: int) -> FoldState:
        """The next epoch begins; one that is known changes nothing."""
        *former, newest = self.epochs
        if epoch <= newest.epoch:
            return self
        return replace(self, epochs=(*former, replace(newest, last=last_before), Epoch(epoch, first)))

    def with_grant(self, granted: int) -> FoldState:
        """Another grant, with the version at which it was given."""
        if granted == self.granted:
            return self
        kept = tuple(g for g in self.grants if g[0] > self.watermark and g[1] != self.version.number)
        return replace(self, granted=granted, grants=(*kept, (granted, self.version.number)))

    @property
    def retired(self) -> int:
        """Tasks that have ended."""
        return self.watermark + len(self.retired_above)

    @property
    def steps(self) -> int:
        """Batches trained since the warm-up."""
        return self.version.number - self.warmup_steps

    def in_warmup(self, task: int) -> bool:
        """Whether the task belongs to the warm-up."""
        return self.warmup_end is None or task < self.warmup_end

    @property
    def grant(self) -> Grant:
        """What the feeder may issue."""
        version = self.version
        return Grant(self.granted, version.number, self.retired, self.warmup_end, self.first_open, version.epoch or msgspec.UNSET)

    @property
    def waiting_tokens(self) -> int:
        """Sampled tokens of what waits for its group or its batch."""
        return sum(r.length for task in self.pending.values() for r in task.rollouts.values())

    @property
    def first_open(self) -> int:
        """Lowest task that is open; `granted` when none is."""
        return next((task for task in range(self.watermark, self.granted) if self.is_open(task)), self.granted)

    @property
    def oldest_needed(self) -> int:
        """Lowest sequence that a trainer resuming from this state reads again."""
        held = [r.sequence for task in self.pending.values() for r in task.rollouts.values()]
        return min([*held, self.cursor + 1])

    def is_retired(self, task: int) -> bool:
        """Whether the task has ended."""
        return task < self.watermark or task in self.retired_above

    def is_open(self, task: int) -> bool:
        """Whether the task has rollouts that are still to end."""
        known = self.pending.get(task)
        return not self.is_retired(task) and (known is None or not known.complete)

    def baseline_of(self, task: int, group_size: int, config: FoldConfig) -> int:
        """The greedy rollout of a task; -1: it has none, as those of the warm-up."""
        return group_size - 1 if config.baseline and not self.in_warmup(task) else -1

    def granted_by(self, version: int) -> int:
        """Tasks below it had been granted by the version number `version`, as far back as open tasks need."""
        return max((granted for granted, at in self.grants if at <= version), default=0)

    def exists(self, epoch: int, lowest: int, highest: int) -> bool:
        """Whether versions `lowest` to `highest` of an epoch exist, as far as its marks tell; numbers not yet trained count as there."""
        if epoch >= len(self.epochs):
            return False
        known = self.epochs[epoch]
        return lowest >= known.first and (known.last is None or highest <= known.last)

    def encode(self) -> bytes:
        """To MessagePack."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> FoldState:
        """From MessagePack; raises SchemaError."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise SchemaError(
                f"expected a fold state in the checkpoint, got {len(data)} bytes that are none: {error}", size_bytes=len(data)
            ) from error


def window(config: FoldConfig) -> int:
    """Most tasks that are outstanding at a time, see `streamrl.core.pacing`."""
    return (config.max_staleness - config.delay_versions + 1) * config.batch_tasks


def initial_state(config: FoldConfig) -> FoldState:
    """The state before the first record: one grant of the whole window."""
    granted = window(config)
    return FoldState(granted=granted, grants=((granted, 0),), warmup_end=None if config.warmup_steps else 0)
