"""Replay: the loop over a run's own log, with nothing published, compared with the ledger digest by digest."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.calls import Caller
from streamrl.consumers.checkpoints import check_stream
from streamrl.consumers.ledger import Ledger, open_ledger
from streamrl.consumers.live import fold_config
from streamrl.consumers.reader import RecordReader
from streamrl.consumers.steps import Stepper
from streamrl.core.state import initial_state
from streamrl.data.model import vocab_size
from streamrl.errors import TrainingError
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
from streamrl.trainers.protocol import Trainer

log = logging.getLogger(__name__)


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found."""

    run: str
    versions: int
    """Ledger entries replayed."""
    equal: int
    """Entries whose digest came out the same."""
    first_difference: str = ""
    """The first version whose digest differs, or an empty string."""
    same_fingerprint: bool = True
    """Whether the numerics fingerprint equals the ledger's; if not, digits may differ without anything being wrong."""
    problem: str = ""
    """Why it could not go on, or an empty string."""
    digest: str = ""
    """Digest of the parameters at the end."""

    @property
    def ok(self) -> bool:
        """Whether every entry was replayed with its digest."""
        return not self.problem and not self.first_difference and self.versions > 0

    @property
    def lines(self) -> list[str]:
        """The report for a person."""
        found = [] if self.same_fingerprint else ["numerics fingerprint differs from the run's: digits may differ without a fault"]
        found.append(f"{self.equal} of {self.versions} versions have the digest of the ledger")
        if self.first_difference:
            found.append(f"first difference: {self.first_difference}")
        if self.problem:
            found.append(f"stopped: {self.problem}")
        return found


def replay(
    *,
    config: Config,
    bus: Bus,
    call: Caller,
    trainer: Trainer,
    fingerprint: str,
    num_tokens: int = 0,
    progress: Callable[[LedgerEntry, bool], None] | None = None,
) -> ReplayReport:
    """Train a run again from its initial weights by its own ledger; call from the training thread.

    Args:
        config: the run's configuration.
        bus: connected; only read.
        call: runs a coroutine of the bus's loop.
        trainer: the backend with the run's initial weights.
        fingerprint: digest of this process's numerics fingerprint.
        num_tokens: vocabulary of the model; 0: token ids are not checked.
        progress: called after every version with its entry and whether the digest was equal.

    Raises:
        LogTruncated: the sample stream has been trimmed; a replay from the start needs all of it.
    """
    subjects = Subjects(config.run.name)
    ledger: Ledger = call(open_ledger(bus, subjects, config.trainer.name))
    rules = fold_config(config, num_tokens)
    call(check_stream(bus, cursor=0, oldest_needed=1, identity=""))
    fingerprints = {entry.fingerprint for entry in ledger.entries.values()}
    reader = RecordReader(bus, call.loop, after=0, capacity=4 * config.tasks.batch_tasks)
    stepper = Stepper(
        reader=reader,
        ledger=ledger,
        trainer=trainer,
        config=rules,
        state=initial_state(rules),
        messages={},
        effects=lambda effects, incoming: None,
    )
    done = equal = 0
    first, problem, digest = "", "", ""
    try:
        while ledger.at(stepper.state.version.number + 1) is not None:
            stepped = stepper.next(lambda: False)
            assert stepped is not None and stepped.past is not None
            digest = stepped.result.digest
            same = digest == stepped.past.digest
            done, equal = done + 1, equal + int(same)
            if not same and not first:
                first = f"version {stepped.past.version}: ledger {stepped.past.digest}, replay {digest}"
            if progress is not None:
                progress(stepped.past, same)
    except TrainingError as error:
        problem = error.message
    finally:
        reader.close()
    return ReplayReport(
        run=config.run.name,
        versions=done,
        equal=equal,
        first_difference=first,
        same_fingerprint=fingerprints <= {fingerprint},
        problem=problem,
        digest=digest,
    )


async def verify(config: Config, bus: Bus, model_dir: Path) -> ReplayReport:
    """Replay a run against its ledger; the whole of `streamrl replay RUN --verify` but for opening the bus."""
    call = Caller(asyncio.get_running_loop())

    def work() -> ReplayReport:
        # Made in the thread that steps it, like the live trainer's backend.
        trainer = make_trainer(config, model_dir)
        fingerprint = fingerprint_digest(numerics_fingerprint(config))
        return replay(config=config, bus=bus, call=call, trainer=trainer, fingerprint=fingerprint, num_tokens=vocab_size(model_dir))

    return await asyncio.to_thread(work)
