"""What a session starts once for all of its tests is nobody's: `scripts.costs` would count it for the test that happens to ask first."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

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
