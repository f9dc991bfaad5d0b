"""Examples as a user gets them: copied by the command line, in lockstep, so that the seed decides what comes out."""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.load import load
from tests.support.harness import read_ledger, run_to_end
from tests.support.programs import STREAMRL
from tests.support.pythons import python
from tests.support.ups import begun

EXAMPLES = Path(__file__).parents[2] / "examples"
LOCKSTEP = ("tasks.max_staleness=0", "run.until_reward=0")
FEW = 20
"""Batches that the first and the last reward are means of, as in a run's summary."""


async def learned(name: str, place: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[int, float, float]:
    """Steps, first and last reward of a run on one event loop; `place` is an empty folder."""
    monkeypatch.chdir(place)
    assert main(["init", "mine", "--example", name]) == 0
    async with begun(place, load(place / _file(name), [*LOCKSTEP, *overrides])) as (run, config, bus):
        await run_to_end(config, run, bus)
        entries = [entry for entry in await read_ledger(bus, config.run.name) if entry.source == "main"]
    rewards = [entry.metrics["rollout/raw_reward"] for entry in entries]
    return len(entries), fmean(rewards[:FEW]), fmean(rewards[-FEW:])


def run_example(name: str, place: Path, *overrides: str) -> dict[str, Any]:
    """The summary of a run with processes of its own; `place` is an empty folder."""
    python(place, *STREAMRL, "init", "mine", "--example", name)
    python(place, *STREAMRL, "up", _file(name), *(word for text in (*LOCKSTEP, *overrides) for word in ("--set", text)))
    [summary] = place.glob("runs/*/summary.json")
    return json.loads(summary.read_text())


def remade(name: str, place: Path) -> dict[str, bytes]:
    """The files that the example's script writes."""
    script = place / "make_problems.py"
    script.write_text((EXAMPLES / name / script.name).read_text())
    python(place, script)
    return {path.name: path.read_bytes() for path in place.glob("*.jsonl")}


def _file(name: str) -> str:
    [path] = (EXAMPLES / name).glob("*.toml")
    return f"mine/{path.name}"
