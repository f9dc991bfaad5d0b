"""Right answers that a grader misses and wrong ones that it takes, by kind, beside math-verify alone: `python -m scripts.graders`.

The answers are those of tests/rewards/answers.jsonl, or of the files that are named: rows with kind, grader, label, answer and expected.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from streamrl.producers.episode import Episode, Segment
from streamrl.rewards.factory import built_in
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import RolloutTask
from streamrl.schemas.versions import Version

FILE = Path(__file__).parents[1] / "tests" / "rewards" / "answers.jsonl"


class Count(msgspec.Struct):
    """Count how often two graders were wrong about answers of a kind."""

    right: int = 0
    wrong: int = 0
    missed: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    """Right answers that were not taken: here, by math-verify."""
    taken: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    """Wrong ones that were."""

    def add(self, other: Count) -> None:
        """Add those of another kind."""
        self.right, self.wrong = self.right + other.right, self.wrong + other.wrong
        for mine, its in ((self.missed, other.missed), (self.taken, other.taken)):
            mine[:] = [one + more for one, more in zip(mine, its, strict=True)]


def takes(grader: str, label: str, answer: str) -> bool:
    """Tell whether the built-in reward of this name gives a positive reward."""
    turn = Segment([0], [0.0], (VersionSpan(1, Version(0, 0)),))
    episode = Episode(segments=(Segment([0]), turn), finish_reason="stop", turns=(answer,))
    task = RolloutTask(run="graders", index=0, source="main", label=label)
    [value] = asyncio.run(built_in(grader, {}).score(task, [episode]))
    return not isinstance(value, Exception) and value.value > 0


def takes_alone(label: str, answer: str) -> bool:
    """Tell whether math-verify takes it, as its users call it."""
    from math_verify import parse, verify

    return verify(parse(f"\\boxed{{{label}}}"), parse(answer))


def counts(rows: Iterable[dict[str, Any]]) -> dict[str, Count]:
    """Count by grader and kind, in their order."""
    found: dict[str, Count] = {}
    for row in rows:
        count = found.setdefault(f"{row['grader']}: {row['kind']}", Count())
        said = takes(row["grader"], row["label"], row["answer"]), takes_alone(row["label"], row["answer"])
        if row["expected"] > 0:
            count.right += 1
        else:
            count.wrong += 1
        for place, taken in enumerate(said):
            count.missed[place] += row["expected"] > 0 and not taken
            count.taken[place] += row["expected"] <= 0 and taken
    return found


def main(arguments: list[str]) -> int:
    """Print a table in Markdown."""
    logging.disable(logging.WARNING)
    files = [Path(name) for name in arguments] or [FILE]
    found = counts(json.loads(line) for file in files for line in file.read_text().splitlines())
    total = Count()
    for count in found.values():
        total.add(count)
    print(f"| answers | right | missed here | by math-verify {version('math-verify')} | wrong | taken here | by math-verify |")
    print("|---|---|---|---|---|---|---|")
    for kind, count in (*found.items(), ("all", total)):
        print(f"| {kind} | {count.right} | {' | '.join(map(str, count.missed))} | {count.wrong} | {' | '.join(map(str, count.taken))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
