"""Two runs of the smallest kind, which tests only look at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.looked_at import LookedAt, that_has_finished, that_stays
from tests.support.shared import shared


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookedAt]:
    with ExitStack() as stack:
        with shared():
            looked = stack.enter_context(that_stays(tmp_path_factory.mktemp("running")))
        yield looked


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    with shared():
        return that_has_finished(tmp_path_factory.mktemp("finished"))
