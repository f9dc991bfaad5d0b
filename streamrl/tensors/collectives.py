"""A failed collective means that another rank has ended, or hangs."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from streamrl.errors import TrainingError

HINT = "one of the trainer's ranks ended or hangs; its log, logs/trainer-<rank>.log, says more. Ranks are restarted together"


@contextmanager
def among_ranks(what: str) -> Generator[None]:
    """Raise TrainingError where torch.distributed raises RuntimeError; its collectives end within `trainer.rank_timeout_s`."""
    try:
        yield
    except RuntimeError as error:
        first = (str(error).strip().splitlines() or [repr(error)])[0]
        raise TrainingError(f"{what} needs all ranks of the trainer: {first}", hint=HINT, what=what) from error
