"""Two runs of the smallest kind, which tests only look at."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.looked_at import LookedAt, that_has_finished, that_stays


@pytest.fixture(scope="session")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookedAt]:
    with that_stays(tmp_path_factory.mktemp("running")) as looked:
        yield looked


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    return that_has_finished(tmp_path_factory.mktemp("finished"))
