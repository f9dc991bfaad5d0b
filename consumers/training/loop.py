"""The live trainer: train, write it down, publish it, checkpoint it, in an order that survives a crash between any two lines.

```text
fence = take_fence(); state = decode(trainer.load(latest)) or initial   (streamrl.consumers.training.resuming: or an older one)
for each record in stream order:    fold                        (streamrl.consumers.training.stream_fold)
    dead letters, grant                                         idempotent
    for each batch that closes:     step                        (streamrl.consumers.training.steps)
        ledger.append(entry)                                    durable, and the fence: a zombie is refused here
        epoch marks                                             onto the stream, before weights of a forked epoch; idempotent
        grant                                                   idempotent
        publisher.offer(version)                                never before its ledger entry
        checkpoint -> latest -> position -> trim                never trimmed below what a restart needs
beside it, every few seconds:       lost tasks -> tombstones    (streamrl.consumers.training.reaper)
```
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from streamrl.bus.protocol import Bus
from streamrl.config.data import has_images
from streamrl.config.tree import Config
from streamrl.consumers.training.books import ledger_books
from streamrl.consumers.training.budget import lower_budget, read_budget
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.carried import fetch_messages, held
from streamrl.consumers.training.checkpoints import Checkpointer, check_stream, ensure_position
from streamrl.consumers.training.dead_letters import UntrainedCounts, publish_blob_missing, publish_dead_letter
from streamrl.consumers.training.divergence import Divergence
from streamrl.consumers.training.gaps import enter_gap
from streamrl.consumers.training.ledger import Ledger, mark_epoch, open_ledger, take_fence
from streamrl.consumers.training.reader import Incoming, RecordReader, open_samples
from streamrl.consumers.training.reaper import Reaper
from streamrl.consumers.training.resuming import Resuming
from streamrl.consumers.training.sample_blobs import NOTHING_REPLAYED, Replayed, sample_blobs
from streamrl.consumers.training.steps import Cut, Stepped, recorded_cut, train_version
from streamrl.consumers.training.stream_fold import StreamFold
from streamrl.core.fold import Effects
from streamrl.core.fold_config import fold_config
from streamrl.core.gaps import bridged
from streamrl.core.state import FoldState, initial_state
from streamrl.errors import Conflict, OutOfMemory, TrainingError
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Grant, MicroBudget, RunEnd, Untrained
from streamrl.schemas.ledger import LedgerEntry, decided_by
from streamrl.schemas.subjects import KEY_GRANTED, SAMPLES, WARMUP_SOURCE, Subjects
from streamrl.schemas.versions import Version
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.token_weights import FOLDER as TOKENS
from streamrl.trainers.token_weights import TokenWeights
from streamrl.weights.protocol import Shard

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""Seconds between two looks whether the sample stream still ends where it was read to."""
REWARD_WINDOW = 20
"""Batches whose mean reward `run.until_reward` looks at."""


class Offers(Protocol):
    """What the loop needs of a publisher."""

    @property
    def publishing(self) -> Version | None: ...
    def offer(self, version: Version, digest: str, shards: Iterable[Shard]) -> None: ...
    def check(self) -> None: ...


class LiveTrainer:
    """One trainer process. `run` is called once, from the training thread; all bus work goes through `call`.

    Args:
        config: the whole tree.
        subjects: of the run.
        bus: connected.
        call: runs a coroutine of the bus's loop.
        trainer: the backend, initial weights loaded.
        publisher: gets every version that is in the ledger.
        run_dir: where checkpoints go.
        fingerprint: digest of the numerics fingerprint.
        replayed: what is trained with of what samples keep beside them.
        vocab_size: of the model; a message with a token beyond it is quarantined. 0: not checked.
        export: called with the version once the warm-up has ended, at the run's end, and as `trainer.export_every` says, to save the
            policy for others to use.
        say: told what people should know, one text at a time.
        doing: told what it does or waits for, in words for people.
    """

    def __init__(
        self,
        *,
        config: Config,
        subjects: Subjects,
        bus: Bus,
        call: Caller,
        trainer: Trainer,
        publisher: Offers,
        run_dir: RunDir,
        fingerprint: str,
        export: Callable[[Version], None],
        say: Callable[[str], None],
        vocab_size: int = 0,
        replayed: Replayed = NOTHING_REPLAYED,
        doing: Callable[[str], None] = lambda state: None,
    ) -> None:
        self.config = config
        self.subjects = subjects
        self.bus = bus
        self.call = call
        self.trainer = trainer
        self.publisher = publisher
        self.run_dir = run_dir
        self.fingerprint = fingerprint
        self.export = export
        self.say = say
        self.fold_config = fold_config(config, vocab_size)
        self.rewards: deque[float] = deque(maxlen=REWARD_WINDOW)
        self._doing = doing
        self._replayed = replayed
        self._token_weights = TokenWeights(run_dir.path / TOKENS, config.trainer.token_weights_bytes)
        self._budget = MicroBudget(0, 0)
        self._deadline = float("inf")
        self._identity, self._look_at_s = "", 0.0
        self._spent_s = 0.0
        """Seconds of `run.max_seconds` that trainers before this one have used."""
        self._granted = (0, 0)
        """Epoch and tasks of the newest grant."""
        self._grant_revision: int | None = None
        self._marked: set[int] = set()
        self._untrained = UntrainedCounts(config.group_size)
        self._fold: StreamFold | None = None

    def untrained(self) -> Untrained:
        """Tell what has become of the stream since the newest batch; asked by the bus's thread."""
        publishing = self.publisher.publishing
        state = initial_state(self.fold_config) if self._fold is None else self._fold.own
        return self._untrained.told(state, "" if publishing is None else str(publishing))

    def run(self, stop: Callable[[], bool]) -> tuple[FoldState, RunEnd | None]:
        """Train until the run's end, which is returned, or until `stop` is true (None); the state returned is checkpointed.

        Raises:
            Fenced: another trainer has taken over.
            CannotResume: there is no checkpoint to go on from (`streamrl.consumers.training.resuming`), or more of the ledger is lost than
                its end (`streamrl.consumers.training.gaps`).
            WeightsDiverged, ConfigError: too many batches gave no gradient (`streamrl.consumers.training.divergence`).
            Diverged: with run.numerics = "bitwise", a step gave other digits than the ledger.
            LogTruncated: the stream no longer holds what is needed.
        """
        call, name = self.call, self.config.trainer.name
        fence = call(take_fence(self.bus, name))
        ledger = call(open_ledger(self.bus, self.subjects, name, fence=fence))
        resumed = Resuming(
            bus=self.bus,
            call=call,
            trainer=self.trainer,
            name=name,
            run_path=self.run_dir.path,
            initial=initial_state(self.fold_config),
            ledger=ledger,
            say=self.say,
        ).resume()
        state, carried = resumed.state, resumed.carried
        self._budget = call(read_budget(self.bus, self.config.trainer))
        call(ensure_position(self.bus, name, state))
        saver = Checkpointer(
            bus=self.bus,
            call=call,
            trainer=self.trainer,
            settings=self.config.trainer,
            run_path=self.run_dir.path,
            identity=resumed.identity,
        )
        if resumed.latest:
            saver.resumed(resumed.latest, carried)
        lost = call(enter_gap(self.bus, self.subjects, ledger, state, self.fold_config, self.run_dir))
        if lost:
            self.say(lost)
        self._mark_epochs(ledger, state)
        self._remember_rewards(ledger)
        self._spent_s = trained_s(self.config, ledger.entries.values())
        self._say_if_over(state, ledger)
        ledger.forget(state.version.number)
        gaps = [gap for _, gap in sorted(ledger.gaps.items())]
        for gap in gaps:
            state = bridged(state, gap)
        # Where an epoch begins, its first version comes before tasks that only this epoch's versions may sample.
        if ledger.last_number <= state.version.number:
            self._offer(state.version, self.trainer.digest())
        self._grant(state.grant)
        pending = carried | call(fetch_messages(self.bus, held(state) - carried.keys()))
        reader = RecordReader(self.bus, call.loop, after=state.cursor, capacity=4 * self.config.tasks.batch_tasks, clock=call.clock)
        fold = StreamFold(
            reader=reader,
            config=self.fold_config,
            state=state,
            messages=open_samples(pending[sequence] for sequence in held(state)),
            gaps=gaps,
            effects=self._take_effects,
            waiting=partial(self._wait, saver),
            blobs=sample_blobs(self.bus, call.loop, self._replayed, self.config, images=has_images(self.config.data)),
            lost=lambda group, rollout, why: call(publish_blob_missing(self.bus, self.subjects, group, rollout, why)),
        )
        self._fold = fold
        logger.info("event=training version=%s cursor=%d ledger=%d fence=%d", state.version, state.cursor, ledger.last_number, fence)
        self._identity = resumed.identity
        reaper = Reaper(self.bus, self.subjects, name, fence, lambda: fold.own, self.fold_config)
        reaping = reaper.start(call.loop)
        try:
            limit = self._train(fold, ledger, saver, stop)
        finally:
            reaping.cancel()
            reader.close()
            self._token_weights.close()
        if limit:
            call(reaper.last_look())
        with self.call.clock.within("checkpoint"):
            saver.flush(fold.own)
        state = fold.own
        if limit or (self.config.trainer.export_every and state.version.number):
            self.export(state.version)
        end = RunEnd(version=state.version, steps=trained_steps(self.config, state), limit=limit, fence=fence)
        return state, end if limit else None

    def _train(self, fold: StreamFold, ledger: Ledger, saver: Checkpointer, stop: Callable[[], bool]) -> str:
        """Train until a limit of the run is reached, which is returned, or `stop` is true: an empty string."""
        books = ledger_books(
            ledger,
            self.call,
            self.config,
            self.fingerprint,
            diverged='compare fingerprints with `streamrl replay RUN --verify`, or set run.numerics = "fast" to fork the epoch',
            appended=lambda stepped: self._appended(ledger, stepped),
        )
        divergence = Divergence(self.config.trainer.max_unlearned, self.say)
        self.call.clock.enter("compute")
        while True:
            self._check_stream(fold.own)
            if limit := self._limit_at(fold.own, ledger):
                return limit
            number = fold.own.version.number + 1
            try:
                stepped = train_version(
                    fold,
                    self.trainer,
                    books,
                    lambda: self._ends(stop, fold.own, ledger),
                    began=lambda batch, number=number: self._doing(f"trains version {number}"),
                    cut=self._cut,
                    say=self.say,
                )
            except OutOfMemory as error:
                self._lower_budget(error.micro_tokens, number)
                self._doing("ends for want of memory, behind the checkpoint that is being written")
                saver.finish_before_failing()
                raise
            if stepped is None:
                if stop():
                    return ""
                continue
            if 0 < stepped.result.micro_tokens < (stepped.arrays.micro_tokens or self.config.trainer.micro_tokens):
                self._lower_budget(stepped.result.micro_tokens, number)
            divergence.check(stepped.state.version, stepped.result)
            state = stepped.state
            if stepped.result.tokens is not None:
                self._token_weights.put(state.version, stepped.arrays, stepped.result.tokens)
            every = self.config.trainer.export_every
            if (stepped.before.warmup_end is None and state.warmup_end is not None) or (every and state.version.number % every == 0):
                self._export_between(state.version)
            self._grant(state.grant)
            if state.version.number >= ledger.last_number:
                self._offer(state.version, stepped.result.digest)
            with self.call.clock.within("checkpoint"):
                saver.after_step(state)

    def _export_between(self, version: Version) -> None:
        """It decides nothing, so training goes on without; the run's end has one of its own."""
        try:
            self.export(version)
        except TrainingError as error:
            self.say(f"version {version} is not exported: {error.message}")

    def _wait(self, saver: Checkpointer, state: FoldState) -> None:
        self._doing(f"waits for samples: {len(state.pending)} groups have begun to come, a batch is {self.config.tasks.batch_tasks}")
        self._check_stream(state)
        with self.call.clock.within("checkpoint"):
            saver.while_waiting(state)

    def _check_stream(self, state: FoldState) -> None:
        """Look once in a while whether the stream is still the one that was read; raises LogTruncated: its server may have lost its end."""
        if time.monotonic() < self._look_at_s:
            return
        self._look_at_s = time.monotonic() + LOOK_EVERY_S
        cursor = state.cursor
        self.call(check_stream(self.bus, cursor=cursor, oldest_needed=cursor + 1, identity=self._identity, cursor_s=state.cursor_s))

    def _cut(self, past: LedgerEntry | None) -> Cut:
        """A version is trained again as it was trained before, with another budget where that was out of memory."""
        found = recorded_cut(past)
        if past is None or past.version.number == self._budget.failed:
            return found._replace(micro_tokens=self._budget.micro_tokens)
        return found

    def _lower_budget(self, micro_tokens: int, number: int) -> None:
        if micro_tokens:
            least = min(micro_tokens, self._budget.micro_tokens)
            self._budget, said = self.call(lower_budget(self.bus, self.config.trainer, least, number))
            self.say(said)

    def _offer(self, version: Version, digest: str) -> None:
        with self.call.clock.within("publish"):
            self.publisher.offer(version, digest, self.trainer.shards())

    def _appended(self, ledger: Ledger, stepped: Stepped) -> None:
        self._mark_epochs(ledger, stepped.state)
        if stepped.arrays.kind == "rl":
            self.rewards.append(stepped.reward or 0.0)

    def _ends(self, stop: Callable[[], bool], state: FoldState, ledger: Ledger) -> bool:
        """Tell whether no further batch is waited for. Raises what has ended the publisher: then no engine has samples to give."""
        self.publisher.check()
        return stop() or bool(self._limit_at(state, ledger))

    def _limit_at(self, state: FoldState, ledger: Ledger) -> str:
        """The limit of the section `run` that is reached; empty: none is, or the ledger has versions that are still to be trained again."""
        if state.version.number < ledger.last_number or in_own_warmup(self.config, state):
            return ""
        limits, steps = self.config.run, trained_steps(self.config, state)
        if steps >= limits.steps:
            return "steps"
        if limits.max_seconds and steps > 0 and self._deadline == float("inf"):
            self._deadline = time.monotonic() + limits.max_seconds - self._spent_s
        if time.monotonic() >= self._deadline:
            return "max_seconds"
        full = len(self.rewards) == REWARD_WINDOW
        return "until_reward" if limits.until_reward and full and sum(self.rewards) / REWARD_WINDOW >= limits.until_reward else ""

    def _say_if_over(self, state: FoldState, ledger: Ledger) -> None:
        """Where a limit of the run lies below what has been trained."""
        limits = self.config.run
        later = [entry for number, entry in ledger.entries.items() if number > state.version.number and entry.source != WARMUP_SOURCE]
        if (steps := trained_steps(self.config, state) + len(later)) > limits.steps:
            self.say(f"run.steps is {limits.steps}, but {steps} batches have been trained: the run ends at once")
        elif 0 < limits.max_seconds <= self._spent_s:
            self.say(f"run.max_seconds is {limits.max_seconds:g}, but {self._spent_s:.0f} s have been trained: the run ends at once")

    def _take_effects(self, effects: Effects, incoming: Incoming) -> None:
        for letter in effects.dead:
            if self._fold is not None:
                self._untrained.dead(self._fold.own.version, letter.reason)
            message = incoming.message
            if message is None:  # readable, but judged impossible in the fold
                message = self.call(self.bus.fetch(SAMPLES, letter.sequence))
            self.call(publish_dead_letter(self.bus, self.subjects, message, letter))
        if effects.grant is not None:
            self._grant(effects.grant)

    def _mark_epochs(self, ledger: Ledger, state: FoldState) -> None:
        """Put onto the stream every epoch of the ledger that is not known from there, before weights of it can be published."""
        for fork in ledger.forks:
            if fork.epoch > state.epochs[-1].epoch and fork.epoch not in self._marked:
                self.call(mark_epoch(self.bus, self.subjects, self.config.trainer.name, fork))
                self._marked.add(fork.epoch)

    def _grant(self, grant: Grant) -> None:
        """Raise the key `granted`; it never goes down."""
        if (grant.of_epoch, grant.granted) > self._granted:
            self._grant_revision = self.call(raise_grant(self.bus, grant, revision=self._grant_revision))
            self._granted = (grant.of_epoch, grant.granted)

    def _remember_rewards(self, ledger: Ledger) -> None:
        for _, entry in sorted(ledger.entries.items()):
            if entry.source != WARMUP_SOURCE:
                self.rewards.append(decided_by(entry).reward or 0.0)


def trained_steps(config: Config, state: FoldState) -> int:
    """Batches that count for `run.steps`: those of reinforcement learning, or of a run of kind `sft` all."""
    return state.version.number if config.run.kind == "sft" else state.steps


def trained_s(config: Config, entries: Iterable[LedgerEntry]) -> float:
    """Seconds after the first batch that counts for `run.steps`: of each later one its step, and how long its samples were waited for.

    The time in which no trainer was up is none of them.
    """
    counted = [entry for entry in entries if config.run.kind == "sft" or entry.source != WARMUP_SOURCE]
    counted.sort(key=lambda entry: entry.version.number)
    return sum(entry.metrics.get("perf/wait_s", 0.0) + entry.metrics.get("perf/step_s", 0.0) for entry in counted[1:])


def in_own_warmup(config: Config, state: FoldState) -> bool:
    """Whether what is trained now does not count for `run.steps`; to the fold a run of kind `sft` is a warm-up throughout."""
    return state.warmup_end is None and config.run.kind == "rl"


async def raise_grant(bus: Bus, grant: Grant, *, revision: int | None = None) -> int | None:
    """Put a grant unless one that is as high is there, of its epoch or a later one; returns its revision, None when it was not put.

    What has been granted is never taken back: a grant of a new epoch is put with the tasks of the one that is there.

    Args:
        bus: connected.
        grant: the new one.
        revision: that of a lower grant, the last one put here: nothing is asked for while nobody else has put one. None: ask.
    """
    while True:
        if revision is None:
            entry = await bus.kv.get(KEY_GRANTED)
            known = decode(entry.value, Grant, where=f"key {KEY_GRANTED}") if entry is not None and entry.value is not None else None
            if known is not None and (known.of_epoch, known.granted) >= (grant.of_epoch, grant.granted):
                return None
            if known is not None and known.granted > grant.granted:
                grant = replace(grant, granted=known.granted)
            revision = entry.revision if entry else 0
        try:
            return await bus.kv.put(KEY_GRANTED, encode(grant), expect=revision)
        except Conflict:
            revision = None
