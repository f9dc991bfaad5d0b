"""Tests that run beside each other do not spin for each other's cores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SET = "import os, sys, tests.conftest; assert 'torch' not in sys.modules; print(os.environ['OMP_NUM_THREADS'])"
"""A program that prints what torch reads when it is loaded."""


@pytest.mark.process
def test_a_process_of_tests_has_one_thread() -> None:
    surroundings = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", SET], cwd=ROOT, env=surroundings, capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
