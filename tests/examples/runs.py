"""Examples as a user runs them: copied, started by the command line, in lockstep, so that the seed decides what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(name: str, place: Path, *overrides: str) -> dict[str, float]:
    """The run's summary; `place` is an empty folder."""
    for words in (
        ["init", "mine", "--example", name],
        ["up", *_files(name), *_set("tasks.max_staleness=0", "run.until_reward=0", *overrides)],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "streamrl", *words],
            cwd=place,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=170,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    [summary] = place.glob("runs/*/summary.json")
    return json.loads(summary.read_text())


def remade(name: str, place: Path) -> dict[str, bytes]:
    """The files that the example's script writes."""
    script = place / "make_problems.py"
    script.write_text((EXAMPLES / name / script.name).read_text())
    subprocess.run([sys.executable, str(script)], check=True)
    return {path.name: path.read_bytes() for path in place.glob("*.jsonl")}


def _files(name: str) -> list[str]:
    return [f"mine/{path.name}" for path in (EXAMPLES / name).glob("*.toml")]


def _set(*overrides: str) -> list[str]:
    return [word for text in overrides for word in ("--set", text)]
