"""Write the pages, tables and pictures of docs/ that are made from the code: `python -m scripts.docs`, or `make docs`.

With `--check` nothing is written, and the exit code says whether something would be.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.docs.pages import stale

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str]) -> int:
    """Write what is not up to date, or name it; returns the exit code."""
    changed = stale(ROOT)
    for path, text in changed.items():
        if "--check" not in arguments:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
        print(f"{'stale' if '--check' in arguments else 'written'}: {path}")
    return 1 if changed and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
