"""Writing a version into a trainer's ledger, or holding it against what is there: what a live trainer and a tap share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import reduce

from msgspec import UNSET

from streamrl.config.tree import Config
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.ledger import Ledger
from streamrl.consumers.training.steps import Books, Stepped, known_reference, same_result
from streamrl.core.assembly import ages, used
from streamrl.core.lengths import added, histogram
from streamrl.core.seeds import run_seed
from streamrl.errors import Diverged
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.versions import Version
from streamrl.tensors.mesh import trained_on
from streamrl.trainers.protocol import StepResult

logger = logging.getLogger(__name__)


def ledger_books(
    ledger: Ledger,
    call: Caller,
    config: Config,
    fingerprint: str,
    *,
    diverged: str,
    hint: str = "",
    appended: Callable[[Stepped], None] | None = None,
) -> Books:
    """A ledger to write to.

    A version that is in it with the same digest is known by that entry. With other digits it is another one: the epoch is forked, or
    with run.numerics = "bitwise" that is an error. On another mesh than the ledger's an epoch begins, whatever the digits.

    Args:
        ledger: opened by whoever holds its fence.
        call: runs a coroutine of the bus's loop.
        config: of whoever trains.
        fingerprint: digest of the numerics fingerprint.
        diverged: what to do about other digits.
        hint: see `Books.hint`.
        appended: called once a version has become durable.

    Returns:
        Its `enter` raises Diverged, and Fenced when another trainer has taken over.
    """
    own = trained_on(config.trainer)

    def moved(entry: LedgerEntry | None) -> bool:
        return entry is not None and entry.trained_on not in (UNSET, own)

    def enter(stepped: Stepped) -> Version:
        past, version = stepped.past, stepped.state.version
        if past is not None and past.version.epoch >= version.epoch:
            if not moved(past):
                if same_result(stepped.result, past):
                    return past.version
                if config.run.numerics == "bitwise":
                    raise Diverged(
                        f"version {past.version} has {_digests(stepped.result, past)}",
                        hint=diverged,
                        version=str(past.version),
                    )
            version = Version(ledger.max_epoch + 1, version.number)
            logger.warning("event=epoch_forked version=%s ledger_version=%s ledger_digest=%s", version, past.version, past.digest)
        elif past is None:
            # The newest epoch may be one that a gap began.
            version = Version(max(version.epoch, ledger.max_epoch + moved(ledger.newest)), version.number)
        call(ledger.append(entry_of(stepped, version, config, fingerprint, fence=ledger.fence)))
        if appended is not None:
            appended(stepped)
        return version

    return Books(ledger.at, enter, hint)


def _digests(result: StepResult, past: LedgerEntry) -> str:
    """Of what differs: the policy, or else the reference alone."""
    of, known, found = "", past.digest, result.digest
    if known == found:
        of, known, found = " of the reference", known_reference(past), result.reference
    return f"digest {known or 'none'}{of} in the ledger, training it again gave {found or 'none'}"


def entry_of(stepped: Stepped, version: Version, config: Config, fingerprint: str, *, fence: int = 0) -> LedgerEntry:
    """The ledger entry of a version. Credits and the end of the warm-up of a branch's or a tap's are those of the parent's beside it.

    Such an entry has no metrics that are not finite: a branch's ledger is JSON, which has no word for them.
    """
    state, before, beside, metrics = stepped.state, stepped.before, stepped.beside, stepped.metrics
    score, reward = stepped.result.score, stepped.reward
    if beside is not None:
        metrics = {name: value for name, value in metrics.items() if abs(value) < float("inf")}
    return LedgerEntry(
        run=config.run.name,
        trainer=config.trainer.name,
        version=version,
        source=stepped.batch.source,
        used=used(stepped.batch),
        drops=before.drops,
        cursor=before.cursor,
        cursor_s=before.cursor_s or UNSET,
        granted=state.granted if beside is None else beside.granted,
        retired=state.retired,
        seed=run_seed(config.run.name, config.run.seed),
        fingerprint=fingerprint,
        digest=stepped.result.digest,
        warm=state.warmup_end is not None if beside is None else beside.warm,
        score=UNSET if score is None else score,
        reward=UNSET if reward is None else reward,
        staleness=tuple(ages(stepped.batch, before)["total"]),
        reference=stepped.result.reference or UNSET,
        trained_on=trained_on(config.trainer),
        micro_tokens=stepped.result.micro_tokens or UNSET,
        choices=stepped.result.choices or UNSET,
        num_samples=stepped.arrays.num_samples,
        num_tokens=stepped.arrays.num_tokens,
        metrics=metrics,
        histograms=_lengths(stepped) or UNSET,
        sources=stepped.arrays.sources or UNSET,
        fence=fence,
        time_s=time.time(),
    )


def _lengths(stepped: Stepped) -> dict[str, tuple[int, ...]]:
    trained = histogram(one.length for group in stepped.batch.groups for one in group.rollouts.values() if one.length)
    dropped = reduce(added, (tally.lengths for tally in stepped.before.dropped.values()), ())
    return {name: counts for name, counts in (("lengths/trained", trained), ("lengths/dropped", dropped)) if counts}
