from __future__ import annotations

from tests.batches import make_batch

__all__ = ["make_batch"]
