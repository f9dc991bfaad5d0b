"""Python's garbage collector in processes that run for days.

By default it looks at young objects every 700 allocations and at all of them now and then: in a process with torch and transformers that is
some 400,000 objects which stay for good, a pause of 0.1 s, and 8 % of the processor time of the quickstart's workers. So workers collect
more rarely, and what is there once they are set up is not looked at again.
"""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 50)
"""New containers before the young generation is looked at, times of that before the middle one is, and of that before all are."""


def collect_rarely() -> None:
    """Set the collector's thresholds; the first thing that a process does."""
    gc.set_threshold(*THRESHOLDS)


def keep_all() -> None:
    """Take all that exists for permanent: call it once the models and modules that live as long as the process are loaded.

    Nothing in a process that is not a worker's, whose collector is not ours to set.
    """
    if gc.get_threshold() == THRESHOLDS:
        gc.collect()
        gc.freeze()


def keep_none() -> None:
    """Let everything be collected again, before the process ends: some libraries count what is left of them then."""
    gc.unfreeze()
