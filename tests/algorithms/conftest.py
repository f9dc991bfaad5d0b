from __future__ import annotations

from tests.core.conftest import make_batch

__all__ = ["make_batch"]
