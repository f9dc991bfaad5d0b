"""What becomes of a process whose parent is killed, on Linux and where the kernel cannot be asked."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.runtime.processes import started
from tests.support.processes import until
from tests.support.programs import Start

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


@pytest.mark.process
@pytest.mark.parametrize("system", ["linux", "elsewhere"])
async def test_a_child_ends_with_its_parent_however_that_ends(start: Start, system: str) -> None:
    parent = await start("-c", PARENT, CHILD, system)
    assert parent.stdout is not None
    child = int(await asyncio.wait_for(parent.stdout.readline(), 60))
    assert started(child)
    parent.kill()
    await until(lambda: not started(child), within_s=60)
