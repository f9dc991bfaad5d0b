from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from streamrl.config.tree import Config, RunConfig
from streamrl.launch.page import page_beside
from streamrl.page.access import page_token
from streamrl.page.index import open_index
from streamrl.page.serving import address_of
from streamrl.runtime.rundir import RunDir
from tests.support.processes import alive, find, until

pytestmark = pytest.mark.process


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "demo")
    run.create()
    run.write_config(Config(run=RunConfig(name="demo", dir=str(tmp_path))))
    return run


def pages(run: RunDir) -> list[int]:
    return [pid for pid in find("page", str(run.path)) if alive(pid)]


async def test_a_page_that_is_killed_comes_again_under_the_same_address_and_goes_with_the_run(run: RunDir) -> None:
    notes: list[str] = []
    async with page_beside(run, 0, note=notes.append, tell=notes.append):
        await until(lambda: notes, within_s=60)
        address = address_of(run)
        assert notes == [f"page: {address}"]
        (first,) = pages(run)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pages(run) not in ([], [first]) and address_of(run, pid=pages(run)[0]), within_s=60)
        assert address_of(run) == address
    assert pages(run) == []
    assert address_of(run) == ""
    assert notes == [f"page: {address}"]
    assert page_token(run) not in run.log_path("page").read_text()


@pytest.mark.parametrize("why", ["port", "index"])
async def test_a_page_that_cannot_be_served_is_said_once_and_the_run_goes_on(run: RunDir, why: str) -> None:
    notes: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if why == "port":
            async with page_beside(run, port, note=notes.append, tell=notes.append):
                await until(lambda: notes, within_s=60)
                await asyncio.sleep(0)
        else:
            with open_index(run):
                async with page_beside(run, 0, note=notes.append, tell=notes.append):
                    await until(lambda: notes, within_s=60)
    expected = f"expected port {port} of 127.0.0.1 to be free" if why == "port" else "expected no other page of run 'demo'"
    assert notes[0].startswith(f"the page is not there: {expected}")
    assert len(notes) == 1
    assert pages(run) == []
