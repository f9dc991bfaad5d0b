"""What is made once a session and only looked at, whichever process of pytest-xdist asks first."""

from __future__ import annotations

import fcntl
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

T = TypeVar("T")


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """What `make(directory)` returns, which pickle can carry. Nobody may change it, nor what lies in the directory."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make(factory.mktemp(name))
    place = factory.getbasetemp().parent / name
    place.mkdir(exist_ok=True)
    stored = place / "made.pickle"
    with (place / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stored.exists():
            (place / "run").mkdir(exist_ok=True)
            stored.write_bytes(pickle.dumps(make(place / "run")))
    return pickle.loads(stored.read_bytes())
