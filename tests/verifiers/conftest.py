from __future__ import annotations

import pytest

from tests.gateway.conftest import loop
from tests.support.needs import need, verifiers_python

__all__ = ["loop"]


@pytest.fixture
def python() -> str:
    """The interpreter that has verifiers."""
    need("verifiers")
    return verifiers_python() or ""
