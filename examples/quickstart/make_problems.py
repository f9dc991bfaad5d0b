"""Write train.jsonl and heldout.jsonl: all sums of a two-digit and a one-digit number, split by a seed.

Usage: python examples/quickstart/make_problems.py [DIRECTORY]
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_HELDOUT = 72
SEED = 0


def problems() -> list[dict[str, str]]:
    return [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(10, 100) for b in range(2, 10)]


def split() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    rows = problems()
    heldout = set(random.Random(SEED).sample(range(len(rows)), NUM_HELDOUT))
    return [row for i, row in enumerate(rows) if i not in heldout], [row for i, row in enumerate(rows) if i in heldout]


def main(directory: Path) -> None:
    for name, rows in zip(("train", "heldout"), split(), strict=True):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (directory / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
