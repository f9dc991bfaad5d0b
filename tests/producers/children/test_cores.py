"""Linux counts for a process its time on cores and its time without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.producers.children.cores import Cores, Had
from tests.support.processes import until

pytestmark = pytest.mark.process
CODE = """
import sys
for line in sys.stdin:
    print("begun", flush=True)
    while line == "spin\\n":
        pass
"""


async def test_it_tells_what_sleeps_from_what_could_run() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:  # noqa: ASYNC220
        assert program.stdin is not None and program.stdout is not None
        cores = Cores(program.pid)
        assert cores.look() == Had(), "its threads are not known yet"
        if not Path("/proc/self/schedstat").exists():  # noqa: ASYNC240
            assert cores.look(state=True) == Had(), "the kernel does not count it"
            return program.kill()
        for line, runnable in ((b"sleep\n", False), (b"spin\n", True)):
            program.stdin.write(line)
            program.stdin.flush()
            program.stdout.readline()
            await until(lambda wanted=runnable: cores.look(state=True).runnable is wanted)
        ran_s = cores.look().ran_s
        await until(lambda: cores.look().ran_s > ran_s > 0)
        program.kill()
        program.wait()
        last = cores.look(state=True)
        assert last.ran_s > 0 and cores.look(state=True) == last, "of one that is gone it is what was known"
        cores.close()


async def test_where_nothing_is_counted_nobody_waits() -> None:
    cores = Cores(os.getpid())
    cores.look()
    files = len(os.listdir("/proc/self/fd"))
    cores.look()
    cores.close()
    assert len(os.listdir("/proc/self/fd")) == files
    gone = Cores(2**22 + 1)  # above any number of a process
    assert [gone.look(state=True) for _ in range(3)] == [Had()] * 3
