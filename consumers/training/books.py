"""Writing a version into a trainer's ledger, or holding it against what is there: what a live trainer and a tap share."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from msgspec import UNSET

from streamrl.config.tree import Config
from streamrl.consumers.training.calls import Caller
from streamrl.consumers.training.ledger import Ledger
from streamrl.consumers.training.steps import Stepped
from streamrl.core.assembly import ages, used
from streamrl.core.seeds import run_seed
from streamrl.errors import Diverged
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)


class LedgerBooks:
    """Implements `streamrl.consumers.training.steps.Books`.

    A version that is in the ledger with the same digest is known by that entry. With other digits it is another one: the epoch is
    forked, or with run.numerics = "bitwise" that is an error.

    Args:
        ledger: opened by whoever holds its fence.
        call: runs a coroutine of the bus's loop.
        config: of whoever trains.
        fingerprint: digest of the numerics fingerprint.
        hint: see `Books.hint`.
        diverged: what to do about other digits.
        appended: called once a version has become durable in the ledger.
    """

    def __init__(
        self,
        ledger: Ledger,
        call: Caller,
        config: Config,
        fingerprint: str,
        *,
        diverged: str,
        hint: str = "",
        appended: Callable[[Stepped], None] | None = None,
    ) -> None:
        self.hint = hint
        self._ledger = ledger
        self._call = call
        self._config = config
        self._fingerprint = fingerprint
        self._diverged = diverged
        self._appended = appended

    def at(self, number: int) -> LedgerEntry | None:
        """See `Entries.at`."""
        return self._ledger.at(number)

    def enter(self, stepped: Stepped) -> Version:
        """See `Books.enter`.

        Raises:
            Diverged: with run.numerics = "bitwise", the step gave other digits than the ledger has.
            Fenced: another trainer has taken over.
        """
        past, version = stepped.past, stepped.state.version
        if past is not None and past.version.epoch >= version.epoch:
            if past.digest == stepped.result.digest:
                return past.version
            if self._config.run.numerics == "bitwise":
                raise Diverged(
                    f"version {past.version} has digest {past.digest} in the ledger, training it again gave {stepped.result.digest}",
                    hint=self._diverged,
                    version=str(past.version),
                )
            version = Version(self._ledger.max_epoch + 1, version.number)
            logger.warning("epoch forked version=%s ledger_version=%s ledger_digest=%s", version, past.version, past.digest)
        self._call(self._ledger.append(entry_of(stepped, version, self._config, self._fingerprint, fence=self._ledger.fence)))
        if self._appended is not None:
            self._appended(stepped)
        return version


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
        granted=state.granted if beside is None else beside.granted,
        retired=state.retired,
        seed=run_seed(config.run.name, config.run.seed),
        fingerprint=fingerprint,
        digest=stepped.result.digest,
        warm=state.warmup_end is not None if beside is None else beside.warm,
        score=UNSET if score is None else score,
        reward=UNSET if reward is None else reward,
        staleness=tuple(ages(stepped.batch, before)["total"]),
        num_samples=stepped.arrays.num_samples,
        num_tokens=stepped.arrays.num_tokens,
        metrics=metrics,
        fence=fence,
        time_s=time.time(),
    )
