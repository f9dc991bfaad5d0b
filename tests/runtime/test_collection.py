"""What a worker does to its process: the garbage collector, and its end with its parent."""

import asyncio
import subprocess
import sys

import pytest

from streamrl.runtime.processes import started
from tests.support.processes import until
from tests.support.programs import Start

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


CHILD = """
import ctypes, os, sys, time
if sys.argv[1] == "elsewhere":
    ctypes.CDLL = lambda *given, **named: object()
from streamrl.runtime.service import die_with_parent
die_with_parent(os.getppid())
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
time.sleep(600)
"""


@pytest.mark.parametrize("system", ["linux", "elsewhere"])
async def test_a_child_ends_with_its_parent_however_that_ends(start: Start, system: str) -> None:
    parent = await start("-c", PARENT, CHILD, system)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert started(child)
    parent.kill()
    await until(lambda: not started(child), within_s=60)
