"""A run of the smallest kind that has finished, which tests only look at."""

from __future__ import annotations

import pytest

from tests.support.looked_at import LookedAt, that_has_finished
from tests.support.shared import made_once


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> LookedAt:
    return made_once(tmp_path_factory, "finished", that_has_finished)
