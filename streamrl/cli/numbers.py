"""Numbers on the command line, within their bounds; argparse says which argument it was."""

from __future__ import annotations

import argparse
import math


def not_negative(text: str) -> float:
    """A finite number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"expected a finite number of at least 0, got {text!r}")
    return value


def seconds(text: str) -> float:
    """A time of at least 0, which may be `inf`."""
    return math.inf if text == "inf" else not_negative(text)
