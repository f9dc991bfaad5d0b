"""Make once a session what all of its tests share, and count it as shared: `scripts.costs` would count it for the test that asks first."""

import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")
CURRENT = "PYTEST_CURRENT_TEST"


@contextmanager
def shared() -> Iterator[None]:
    """Count what is started here, and by those processes, for the session."""
    before = os.environ.get(CURRENT)
    os.environ[CURRENT] = "shared (setup)"
    try:
        yield
    finally:
        if before is None:
            del os.environ[CURRENT]
        else:
            os.environ[CURRENT] = before


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make(factory.mktemp(name))
    place = factory.getbasetemp().parent / name
    place.mkdir(exist_ok=True)
    stored = place / "made.pickle"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stored.exists():
            (place / "run").mkdir(exist_ok=True)
            with shared():
                stored.write_bytes(pickle.dumps(make(place / "run")))
    return pickle.loads(stored.read_bytes())
