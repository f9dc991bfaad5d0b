"""The smallest run: four sums, started with `tests/launch/tiny_up.py`, which puts tiny workers in place of the real ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from tests.support.programs import Start

TOML = """
[run]
name = "demo"
[data]
train = "train.jsonl"
heldout = "train.jsonl"
[engine]
kind = "table"
[trainer]
backend = "table"
[supervise]
drain_s = 5
backoff_s = 0.05
"""
TINY_UP = Path(__file__).parents[1] / "launch" / "tiny_up.py"


def write_tiny(place: Path, toml: str = TOML) -> None:
    """Put `demo.toml` with the text `toml`, and four problems, into a directory."""
    (place / "demo.toml").write_text(toml)
    rows = [{"prompt": f"{a}+{a}=", "label": str(a + a)} for a in range(4)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tiny_up(start: Start) -> Start:
    """What starts `tiny_up.py` on it: the mode, then overrides."""
    return partial(start, str(TINY_UP), "demo.toml")
