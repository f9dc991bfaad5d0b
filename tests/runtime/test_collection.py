"""What a worker does to the garbage collector, in a process of its own: the settings are the process's."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import gc
from streamrl.runtime.collection import THRESHOLDS, collect_rarely, keep_all, keep_none

class Node:
    pass

keep_all()
assert gc.get_freeze_count() == 0  # not a worker
collect_rarely()
assert gc.get_threshold() == THRESHOLDS
kept = [Node() for _ in range(1000)]
keep_all()
assert gc.get_freeze_count() > 1000
assert not any(isinstance(found, Node) for found in gc.get_objects())
one = Node()
one.own = one
del one
assert gc.collect() >= 1  # what comes later is still collected
keep_none()
assert gc.get_freeze_count() == 0
"""


@pytest.mark.process
def test_what_is_there_is_left_alone_and_what_comes_later_is_collected() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True)
