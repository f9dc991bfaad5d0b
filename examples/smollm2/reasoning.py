"""Write rows of reasoning-gym: `python reasoning.py NAME...` writes NAME.jsonl and NAME-heldout.jsonl beside this file.

It needs `pip install reasoning-gym`. Tasks whose answer is a number go with `reward.kind = "gsm8k"`, others with a reward of your own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SIZES = {
    "gcd": {"max_value": 100},
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
}
"""Sizes at which this model is right now and then; where it never is, there is nothing to learn from."""


def main(names: list[str]) -> None:
    """Write 2,000 rows of each to train on, and 256 that are in none of these."""
    import reasoning_gym

    here = Path(__file__).parent
    for name in names:
        rows = {row["question"]: str(row["answer"]) for row in reasoning_gym.create_dataset(name, size=4000, seed=0, **SIZES.get(name, {}))}
        found = [json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows.items()][:2256]
        (here / f"{name}-heldout.jsonl").write_text("".join(found[:256]), encoding="utf-8")
        (here / f"{name}.jsonl").write_text("".join(found[256:]), encoding="utf-8")
        print(f"{name}: {len(found) - 256} rows to train on, 256 held out")


if __name__ == "__main__":
    main(sys.argv[1:] or sys.exit(__doc__))
