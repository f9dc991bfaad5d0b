"""Checks what an evaluator has told against the lines that it has stored, without the package's own code."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def problems_of(told: Sequence[dict[str, Any]], folder: Path, *, rows: dict[str, int], pass_reward: float = 1.0) -> list[str]:
    found: list[str] = []
    times = Counter((one["set"], one["version"], one["final"]) for one in told)
    found += [f"{place} was told {count} times" for place, count in times.items() if count > 1]
    for one in told:
        place = f"{one['set']} at {one['version']}"
        lines = (folder / one["version"] / f"{one['set']}.jsonl").read_text().splitlines()[1:]
        records = [json.loads(line) for line in lines]
        counted = Counter(record["row"] for record in records)
        if sorted(counted) != list(range(rows[one["set"]])):
            found.append(f"{place}: expected each of {rows[one['set']]} problems, got {sorted(counted)}")
        found += [f"{place}: problem {row} is stored {count} times" for row, count in counted.items() if count > 1]
        samples = [sample for record in records for sample in record["samples"]]
        rewards = [[s["reward"] for s in record["samples"] if s.get("reward") is not None] for record in records]
        flat = [reward for some in rewards for reward in some]
        means = [sum(some) / len(some) for some in rewards if some]
        expected = {
            "num": len(records),
            "samples": one["n"] * rows[one["set"]],
            "answered": len(flat),
            "failed": len(samples) - len(flat),
            "right": sum(reward >= pass_reward for reward in flat),
        }
        found += [f"{place}: expected {name} = {value}, got {one[name]}" for name, value in expected.items() if one[name] != value]
        mean = sum(means) / len(means) if means else None
        if (mean is None) != (one["accuracy"] is None) or (mean is not None and abs(mean - one["accuracy"]) > 1e-12):
            found.append(f"{place}: expected a mean of {mean}, got {one['accuracy']}")
    return found
