"""A run of the smallest kind that has finished, which tests only look at."""

from __future__ import annotations

import pytest

from tests.support.looked_at import LookedAt, that_has_finished


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    return that_has_finished(tmp_path_factory.mktemp("finished"))
