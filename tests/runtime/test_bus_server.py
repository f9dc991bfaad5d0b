"""The embedded server of a run whose supervisor before was killed where no server ends with its parent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator
from pathlib import Path

import pytest

from streamrl.config.tree import Config, RunConfig
from streamrl.launch.down import stop_run
from streamrl.runtime.bus_server import end_former, run_bus_server
from streamrl.runtime.processes import started
from streamrl.runtime.rundir import RunDir
from tests.support.programs import Start

pytestmark = pytest.mark.nats

SUPERVISOR = """
import asyncio, ctypes, sys
ctypes.CDLL = lambda *given, **named: object()
from pathlib import Path
from streamrl.config.tree import Config, RunConfig
from streamrl.runtime.bus_server import run_bus_server
from streamrl.runtime.rundir import RunDir


async def main():
    async with run_bus_server(Config(run=RunConfig(name="demo")), RunDir(sys.argv[1]), print):
        print("up", flush=True)
        await asyncio.sleep(600)


asyncio.run(main())
"""


@pytest.fixture
def run(tmp_path: Path) -> Generator[RunDir]:
    run = RunDir(tmp_path / "demo")
    run.create()
    yield run
    end_former(run)  # a test that has failed leaves none


def server_of(run: RunDir) -> tuple[int, str]:
    """Process id and start of the run's server, as they were written down."""
    pid, _, began = (run.bus_store / "nats-server.process").read_text().partition(" ")
    return int(pid), began


@pytest.mark.parametrize("by", ["up", "down"])
async def test_a_server_that_outlives_its_supervisor_is_ended_before_another_opens_its_store(start: Start, run: RunDir, by: str) -> None:
    supervisor = await start("-c", SUPERVISOR, str(run.path))
    assert supervisor.stdout is not None
    assert await asyncio.wait_for(supervisor.stdout.readline(), 60) == b"up\n"
    supervisor.kill()
    await supervisor.wait()
    pid, began = server_of(run)
    assert started(pid) == began, "it lives on"
    if by == "down":
        run.write_config(Config(run=RunConfig(name="demo")))
        assert not stop_run(run, now=False, timeout_s=60)
        assert started(pid) != began
        return
    async with run_bus_server(Config(run=RunConfig(name="demo")), run, print):
        assert started(pid) != began
        assert server_of(run)[0] != pid


@pytest.mark.parametrize("text", ["", "nonsense", "1 0", "0 0", "own 17", "99999999999999999999 1", "²3 1", "\x00"])
async def test_what_was_written_down_of_a_server_ends_nobody_else(run: RunDir, text: str) -> None:
    run.bus_store.mkdir(parents=True, exist_ok=True)
    (run.bus_store / "nats-server.process").write_text(text.replace("own", str(os.getpid())))
    async with run_bus_server(Config(run=RunConfig(name="demo")), run, print):
        pid, began = server_of(run)
        assert started(pid) == began
