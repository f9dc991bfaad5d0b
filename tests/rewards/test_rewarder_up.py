"""`streamrl rewarder`: processes that join a run which is up, of another host too, are killed, and leave."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.role_server import started, trained, until, write_run

pytestmark = [pytest.mark.process, pytest.mark.slow]


async def test_rewarders_join_are_killed_and_leave(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there):
        place.mkdir()
    write_run(here, steps=100_000)
    own = here / "runs" / "demo" / "logs" / "rewarder-0.log"
    async with started(["up", "demo.toml", "--plain", "--set", "warmup.max_steps=0", "--set", "reward.workers=1"], here) as up:
        await until(lambda: trained(here) > 0, up, here)
        async with started(["credentials", "demo", "--role", "rewarder", "--out", str(there / "r.attach")], here) as export:
            assert await export.wait() == 0, (here / "out").read_text()
        command = ["rewarder", "--credentials", "r.attach"]
        async with started(command, there) as guest:
            assert await guest.wait() == 1
        assert "is user code" in (there / "out").read_text()
        (there / "reward.py").write_text("def letters(task, episode):\n    return 1.0\n")
        async with started([*command, "--reward", "reward.py:letters"], there) as guest:
            assert await guest.wait() == 2
        assert "run demo was started" in (there / "out").read_text()
        shutil.copy(here / "reward.py", there / "reward.py")
        async with started([*command, "--reward", "reward.py:letters"], there) as guest:
            logs = RunDir(there / "runs" / "attached" / "demo").path / "logs"
            own_start = re.compile(rf"event=started .*pid={guest.pid}\b")  # the guest before has left a log too
            await until(lambda: any(own_start.search(log.read_text()) for log in logs.glob("rewarder-*.log")), guest, there)
            # The run's own one is stopped dead: the guest has all the work, and what it held.
            before = trained(here)
            os.kill(int(re.findall(r"event=started .*pid=([0-9]+)", own.read_text())[-1]), signal.SIGKILL)
            await until(lambda: trained(here) > before + 8, up, here)
            guest.terminate()
            assert await guest.wait() == 0
        assert "has left run demo" in (there / "out").read_text()
        before = trained(here)
        await until(lambda: trained(here) > before + 8, up, here)
        assert len(re.findall("event=started ", own.read_text())) == 2
