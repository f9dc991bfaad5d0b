"""Runs that tests only look at: one that has finished, and one that stays up while it is looked at."""

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from streamrl.runtime.rundir import RunDir
from tests.support.digits import TABLE, write_digits
from tests.support.programs import STREAMRL, surroundings

STAYS = ("run.steps=100000", "tasks.drop_zero_variance=false", "debug.token_delay_s=0.1", "metrics.window_s=2", "evaluation.every=100")
"""A run that goes on, and leaves the machine to others."""
STRICT = ("slo.hold_s=0", "metrics.window_s=1")
"""Every objective is judged at once."""


def sets(*keys: str) -> list[str]:
    """Overrides as the command line has them."""
    return [word for key in keys for word in ("--set", key)]


class LookedAt:
    """A run, and commands in the folder that holds its file `run.toml`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.run = RunDir(place / "runs" / "digits")
        self.said_by_up = ""
        """Written by the `up` that has ended."""

    def started(self, *words: str, **streams: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, *STREAMRL, *words], cwd=self.place, text=True, env=surroundings(), **streams)

    def said(self, *words: str, **env: str) -> tuple[int, str, str]:
        """Exit code, output and errors of a command."""
        command = [sys.executable, *STREAMRL, *words]
        done = subprocess.run(command, cwd=self.place, env=surroundings(env), capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout, done.stderr

    def answer(self, *words: str) -> Any:
        """What a command that must succeed prints as JSON."""
        code, out, err = self.said(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    def log(self, worker: str) -> str:
        path = self.run.log_path(worker)
        return path.read_text() if path.exists() else ""


@contextlib.contextmanager
def that_stays(place: Path) -> Iterator[LookedAt]:
    """A run that trains while the context is open."""
    write_digits(place, TABLE)
    looked = LookedAt(place)
    with (place / "up.txt").open("w") as out:
        up = looked.started("up", "run.toml", "--plain", *sets(*STAYS), stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 120
        while "event=training version" not in looked.log("trainer-0"):
            assert up.poll() is None and time.monotonic() < deadline, (place / "up.txt").read_text()
            time.sleep(0.1)
        yield looked
    finally:
        up.terminate()
        try:
            up.wait(120)
        finally:
            up.kill()


def that_has_finished(place: Path) -> LookedAt:
    """A run that has learned, and met the strictest objectives."""
    write_digits(place, TABLE)
    looked = LookedAt(place)
    code, looked.said_by_up, err = looked.said("up", "run.toml", "--plain", *sets(*STRICT))
    assert (code, err) == (0, "")
    return looked
