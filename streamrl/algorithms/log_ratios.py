"""The bound that keeps exp of a log-ratio finite, the same wherever one is taken."""

from __future__ import annotations

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus and minus this before exp: e^20 is 5e8, whose square float32 still holds."""
