"""What `make.py` and the tests share: the recorded runs, their archives, and the command line as a user has it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "recorded" / "data"
RECORDING = "recording"
"""Directory of a run's recording, beside `runs/`."""
PATIENCE_S = 120.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "streamrl", *arguments]


def surroundings() -> dict[str, str]:
    """The environment with this checkout in it, for the reward is a module of the tests, and with numpy's plainest kernels."""
    plain = "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"
    return {**os.environ, "PYTHONPATH": str(ROOT), "NPY_DISABLE_CPU_FEATURES": plain}


def say(place: Path, *arguments: str) -> Any:
    """Run a command with `--json` in `place`; returns what it prints, and fails with its words."""
    done = subprocess.run(
        command(*arguments, "--json"), cwd=place, env=surroundings(), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Answering:
    """One process that runs commands one after the other, so that what they import is imported once. Use as a context manager."""

    def __enter__(self) -> Answering:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.recorded.answering"], env=surroundings(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        return self

    def __exit__(self, *error: object) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(PATIENCE_S)

    def ask(self, *arguments: str) -> tuple[int, str, str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(arguments) + "\n")
        self._process.stdin.flush()
        code, out, err = json.loads(self._process.stdout.readline())
        return code, out, err


@contextlib.contextmanager
def started(place: Path, *arguments: str, words: str = "words.txt") -> Iterator[subprocess.Popen[str]]:
    """A process in `place`, whose words go to a file there; killed at the end if it still runs."""
    with (place / words).open("w") as file:
        process = subprocess.Popen(arguments, cwd=place, env=surroundings(), stdout=file, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} never came"
        time.sleep(0.05)


@contextlib.contextmanager
def judged(place: Path, name: str) -> Iterator[None]:
    """The run `late` needs somebody who gives rewards once its bus is up; the others need nobody."""
    if name != "late":
        yield
        return
    run = place / "runs" / name
    until((run / "bus.json").exists, "the bus")
    with started(place, sys.executable, "-m", "tests.recorded.judge", str(run), words="judge.txt"):
        yield


def unpack(name: str, place: Path) -> dict[str, Any]:
    """Put a recorded run into `place`: `runs/<name>/`, `recording/`, `run.toml` and its rows; returns the facts that were kept of it."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    # What was in it is not packed; `up` makes new secrets, and the verbs that only read want the directory.
    (place / "runs" / name / "credentials").mkdir(mode=0o700)
    return json.loads((DATA / f"{name}.json").read_text())


def ledger(recording: Path) -> list[dict[str, Any]]:
    return pq.read_table(recording / "ledger.parquet").to_pylist()


def versions(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['epoch']}.{row['number']}" for row in rows]


def body_digest(rows: list[dict[str, Any]]) -> str:
    """SHA-256 of the exact bytes of ledger entries, in stream order."""
    return hashlib.sha256(b"".join(row["body"] for row in rows)).hexdigest()


def drops(rows: list[dict[str, Any]]) -> dict[str, int]:
    return dict(sorted(Counter(drop["reason"] for row in rows for drop in row["drops"]).items()))
