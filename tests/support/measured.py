"""Print what tests on GPUs measure."""

from __future__ import annotations


def say(text: str) -> None:
    """Print it, whatever pytest captures; `scripts/gpu` keeps it."""
    print(f"\n[measured] {text}", flush=True)
