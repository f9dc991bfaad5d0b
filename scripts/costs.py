"""Count what the tests cost, by folder, and hold it by a ratchet.

`scripts.run_tests` counts what each test starts and the processor time it takes, prints a table by folder and keeps the last figures of
each tier in `.pytest_cache/costs.json`. Processor time depends on the machine; counts do not, so counts have limits, in
`tests/costs.toml`: a folder that starts more than its limit fails the run, and `make lint` after it.

    python -m scripts.costs              compare the last figures with the limits
    python -m scripts.costs --write      lower the limits to the last figures

`--write` never raises a limit. To raise one, edit the file, in a commit that says why.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMITS = ROOT / "tests" / "costs.toml"
LAST = ROOT / ".pytest_cache" / "costs.json"
COUNTING = ROOT / "tests" / "support" / "counting"
"""The folder that goes onto PYTHONPATH: its `sitecustomize` writes down what is started."""
VARIABLE = "STREAMRL_STARTS"
"""The environment variable that names the file it writes to."""
KINDS = ("up", "nats-server", "torch import", "torch.compile", "compiler", "ray head", "sglang server", "python")
"""Columns of the table, in order."""
LIMITED = KINDS[:-1]
"""The number of processes of Python depends on restarts, and so on time: it is shown and has no limit."""
SHARED = "shared"
"""Stands for the fixtures that each worker of a session starts once, whichever test asks first: they have no limit."""
Limits = Mapping[str, Mapping[str, int]]


@dataclass
class Costs:
    """The costs of one selection of tests."""

    core_s: Counter[str] = field(default_factory=Counter)
    """Processor seconds by folder."""
    starts: dict[str, Counter[str]] = field(default_factory=dict)
    """Starts by kind, by folder."""

    def spend(self, test: str, core_s: float) -> None:
        """Add the processor seconds of one phase of a test."""
        self.core_s[folder(test)] += core_s  # pyright: ignore[reportArgumentType]

    def read_starts(self, lines: Iterable[str]) -> None:
        """Add starts: lines of a kind, a tab and a test."""
        for line in lines:
            kind, _, test = line.rstrip("\n").partition("\t")
            self.starts.setdefault(folder(test), Counter())[kind] += 1

    def table(self, total_core_s: float) -> str:
        """Render one row a folder, the dearest first; `total_core_s` includes what no test waited for."""
        width = max(map(len, (*self.core_s, *self.starts, "others")), default=0)
        lines = [f"{'':{width}} {'core-s':>8} " + " ".join(f"{kind:>13}" for kind in KINDS)]
        for name in sorted({*self.core_s, *self.starts}, key=lambda name: (-self.core_s[name], name)):
            counts = self.starts.get(name, Counter())
            lines.append(f"{name:{width}} {self.core_s[name]:8.1f} " + " ".join(f"{counts[kind] or '':>13}" for kind in KINDS))
        sums = sum(self.starts.values(), Counter[str]())
        rest = total_core_s - sum(self.core_s.values())
        lines.append(f"{'others':{width}} {rest:8.1f} ")
        lines.append(f"{'all':{width}} {total_core_s:8.1f} " + " ".join(f"{sums[kind] or '':>13}" for kind in KINDS))
        return "\n".join(lines)

    def over(self, limits: Limits) -> list[str]:
        """Name the folders that start more than they may; a tier without any limits yet has none."""
        if not limits:
            return []
        return [
            f"tests/{name}: expected at most {limits.get(name, {}).get(kind, 0)} of `{kind}`, got {counts[kind]}"
            for name, counts in sorted(self.starts.items())
            for kind in LIMITED
            if name != SHARED and counts[kind] > limits.get(name, {}).get(kind, 0)
        ]


def folder(test: str) -> str:
    """The folder of tests/ that a node id lies in; `SHARED` for none."""
    parts = test.partition("::")[0].split("/")
    return parts[1] if len(parts) > 2 and parts[0] == "tests" else SHARED


def read_limits(tier: str) -> dict[str, dict[str, int]]:
    """The limits of a tier, by folder and kind."""
    return tomllib.loads(LIMITS.read_text(encoding="utf-8")).get(tier, {}) if LIMITS.exists() else {}


def keep(tier: str, costs: Costs) -> None:
    """Store the starts of a tier as the last ones."""
    LAST.parent.mkdir(exist_ok=True)
    LAST.write_text(json.dumps(_last() | {tier: costs.starts}), encoding="utf-8")


def _last() -> dict[str, dict[str, dict[str, int]]]:
    return json.loads(LAST.read_text(encoding="utf-8")) if LAST.exists() else {}


def lowered(limits: Limits, starts: Limits, *, fresh: bool) -> dict[str, dict[str, int]]:
    """Limits that are no higher than before and no higher than what was started; all that was started, where there were none."""
    return {
        name: {
            kind: counts.get(kind, 0) if fresh else min(counts.get(kind, 0), limits[name][kind])
            for kind in LIMITED
            if counts.get(kind, 0) and (fresh or kind in limits.get(name, {}))
        }
        for name, counts in starts.items()
        if name != SHARED and (fresh or name in limits)
    }


def write(tiers: Mapping[str, Limits]) -> None:
    """Write the file of limits."""
    lines = ["# How much each folder's tests may start, by tier. `python -m scripts.costs --write` lowers these numbers."]
    for tier, limits in sorted(tiers.items()):
        for name, counts in sorted(limits.items()):
            if counts:
                lines += ["", f"[{tier}.{name}]", *(f'"{kind}" = {counts[kind]}' for kind in LIMITED if kind in counts)]
    LIMITS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> int:
    """Run the command; 1 when a folder is over its limits."""
    parser = argparse.ArgumentParser(prog="costs", description="Compare what the last runs of the tests started with the limits.")
    parser.add_argument("--write", action="store_true", help="lower the limits to the last figures")
    options = parser.parse_args()
    last = {tier: Costs(starts={name: Counter(counts) for name, counts in starts.items()}) for tier, starts in _last().items()}
    if options.write:
        tiers = tomllib.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
        write(tiers | {tier: lowered(tiers.get(tier, {}), costs.starts, fresh=tier not in tiers) for tier, costs in last.items()})
        return 0
    over = [f"{tier}: {line}" for tier, costs in last.items() for line in costs.over(read_limits(tier))]
    for line in over:
        print(f"error: {line}\nhint: share what it starts with tests that are there, or raise the limit in tests/costs.toml and say why")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
