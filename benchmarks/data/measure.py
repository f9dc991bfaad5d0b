"""Sets of short rows are written, and a feeder is started on each: with no index beside the run, and with the one that was kept."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import describe, machine
from streamrl.data.model import write_table

_CHUNK = 100_000
KINDS = ("jsonl", "parquet", "arrow")


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows of each set (default 10000000)")
    parser.add_argument("--tasks", type=int, default=1024, help="tasks that are issued (default 1024)")
    parser.add_argument("--rounds", type=int, default=3, help="starts of each kind (default 3)")
    parser.add_argument("--dir", default="", help="where the sets are written (default: a temporary directory)")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=given.dir or None) as place:
        say(f"{describe(machine(('numpy', 'pyarrow', 'msgspec', 'tokenizers')))}\n")
        say("| set | MB | start | first task s | all tasks s | resident MB | index MB |\n|---|---|---|---|---|---|---|")
        model = Path(place) / "model"
        write_table(model, max_position=8)
        (model / "config.json").write_text('{"vocab_size": 104}\n')
        for kind in KINDS:
            path = Path(place) / f"rows.{kind}"
            write(path, kind, given.rows)
            for number in range(given.rounds):
                runs = Path(place) / f"{kind}-{number}"
                for start in ("first", "again"):
                    row = first_task(path, model, runs, given.tasks)
                    values = [row["first_s"], row["last_s"], row["resident_mb"], row["index_mb"]]
                    cells = [f"{value:.2f}" if value < 10 else f"{value:.0f}" for value in values]
                    say(f"| {kind} | {path.stat().st_size / 1e6:.0f} | {start} | {' | '.join(cells)} |")
            path.unlink()
    return 0


def first_task(path: Path, model: Path, runs: Path, tasks: int) -> dict[str, float]:
    """What one feeder took, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.data.first_task", str(path), str(model), str(runs), str(tasks)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def write(path: Path, kind: str, rows: int) -> None:
    """A set of short questions: about 90 bytes a row as JSON Lines."""
    schema = pa.schema([("prompt", pa.utf8()), ("label", pa.utf8())])
    if kind == "jsonl":
        with path.open("w", buffering=1 << 22) as file:
            for chunk in questions(rows):
                file.write("".join(f'{{"prompt":"{prompt}","label":"{label}"}}\n' for prompt, label in chunk))
        return
    writer = pq.ParquetWriter(path, schema) if kind == "parquet" else pa.ipc.new_file(str(path), schema)
    with writer:
        for chunk in questions(rows):
            prompts, labels = zip(*chunk, strict=True)
            writer.write_table(pa.table([list(prompts), list(labels)], schema=schema))


def questions(rows: int) -> Iterator[list[tuple[str, str]]]:
    """Prompts and labels, no two alike in what follows each other."""
    for start in range(0, rows, _CHUNK):
        pairs = ((n * 7919 % 10_000_019, n * 104_729 % 9_999_991) for n in range(start, min(rows, start + _CHUNK)))
        yield [(f"What is {a} plus {b}? Answer with the number alone.", str(a + b)) for a, b in pairs]


def say(text: str) -> None:
    """A line for people."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
