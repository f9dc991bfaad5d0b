"""The smallest run: four sums, started with `tests/launch/tiny_up.py`, which puts tiny workers in place of the real ones."""

import json
import sys
import time
from functools import partial
from pathlib import Path

from streamrl.bus.protocol import Bus
from streamrl.consumers.training.ledger import take_fence
from streamrl.launch.local import Command
from streamrl.runtime.run_end import write_end
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import encode
from streamrl.schemas.control import RunEnd
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version
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
TINY_WORKER = TINY_UP.with_name("tiny_worker.py")


def write_tiny(place: Path, toml: str = TOML) -> None:
    """Put `demo.toml` with the text `toml`, and four problems, into a directory."""
    (place / "demo.toml").write_text(toml)
    rows = [{"prompt": f"{a}+{a}=", "label": str(a + a)} for a in range(4)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def tiny_command(run: RunDir, mode: str) -> Command:
    return lambda kind, index: (sys.executable, str(TINY_WORKER), kind, str(run.path), mode)


def tiny_up(start: Start) -> Start:
    """What starts `tiny_up.py` on it: the mode, then overrides."""
    return partial(start, str(TINY_UP), "demo.toml")


def ledger_entry(run: str, number: int) -> LedgerEntry:
    """Batch `number` of 30, in which the reward rises to 1."""
    return LedgerEntry(
        run=run,
        trainer="main",
        version=Version(0, number),
        source="main",
        used=(),
        cursor=number,
        granted=0,
        retired=number,
        staleness=(1,),
        num_tokens=10,
        metrics={"rollout/raw_reward": number / 30},
        time_s=time.time(),
    )


async def learned(bus: Bus, run: str, first: int = 1, last: int = 30) -> None:
    for number in range(first, last + 1):
        await bus.publish(Subjects(run).ledger("main"), encode(ledger_entry(run, number)), id=f"0.{number}")


async def ended(bus: Bus, number: int, *, steps: int | None = None, limit: str = "steps") -> None:
    """Come to the run's end with a version, as a trainer that has begun since does."""
    fence = await take_fence(bus, "main")
    end = RunEnd(version=Version(0, number), steps=number if steps is None else steps, limit=limit, fence=fence)
    await write_end(bus, "main", end)


async def evaluated(bus: Bus, run: str, number: int, accuracy: float) -> None:
    version, problem = f"0.{number}", {"prompt": "1+1=", "expected": "2", "got": "2" if accuracy > 0.5 else "5"}
    detail = {"version": version, "versions": [version, version], "accuracy": accuracy, "num": 8, "problems": [problem]}
    await bus.publish(Subjects(run).events("evaluation"), encode(Event(kind="evaluation", worker="evaluator-0", detail=detail)))
