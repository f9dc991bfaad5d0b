"""Programs of Python that a test waits for."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.programs import surroundings


def python(place: Path, *words: object, code: int = 0, env: Mapping[str, str] | None = None, within_s: float = 170) -> tuple[str, str]:
    """Return what a Python program writes to stdout and stderr; it must end with this code."""
    command, around = [sys.executable, *map(str, words)], surroundings() if env is None else env
    done = subprocess.run(command, cwd=place, env=around, text=True, capture_output=True, timeout=within_s, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr
