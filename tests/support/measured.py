"""Print what tests on GPUs measure."""

from __future__ import annotations


def say(text: str) -> None:
    print(f"\n[measured] {text}", flush=True)
