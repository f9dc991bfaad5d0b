"""Numbers on the command line, within their bounds; argparse says which argument it was."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def finite(text: str) -> float:
    """A finite number."""
    return _number(text, "a finite number", lambda value: True)


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    return _number(text, "a finite number of at least 0", lambda value: value >= 0)


def seconds(text: str) -> float:
    """A time, in seconds."""
    return _number(text, "a finite number of at least 0 seconds", lambda value: value >= 0)


def _number(text: str, expected: str, fits: Callable[[float], bool]) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or not fits(value):
        raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
    return value
