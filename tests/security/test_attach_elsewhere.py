"""A run that lives from a producer which reaches its bus and engines, and has never seen its directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.needs import need
from tests.support.role_server import started, trained, until, write_run

pytestmark = pytest.mark.process

AGENT = """
async def agent(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    chat.user("1")
    await chat.generate()
    return chat.episode()
"""


async def test_a_producer_of_another_host_carries_a_run(tmp_path: Path) -> None:
    need("hosts")
    here, there = tmp_path / "here", tmp_path / "there"
    for place in (here, there / "home", here / "home"):
        place.mkdir(parents=True)
    write_run(here, steps=10_000, producer="workers = 0")
    (there / "agent.py").write_text(AGENT)
    async with started(["up", "demo.toml", "--plain", "--set", "warmup.max_steps=0"], here) as up:
        await until(lambda: RunDir(here / "runs" / "demo").exists and "starting" in (here / "out").read_text(), up, here)
        async with started(["credentials", "demo", "--out", str(there / "demo.attach")], here) as export:
            assert await export.wait() == 0, (here / "out").read_text()
        # Of the run's folder nothing is seen there.
        hidden = ("unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs "{here}" && exec "$@"', "sh")
        command = ["attach", "agent.py:agent", "--credentials", "demo.attach"]
        home = {"HOME": str(there / "home")}
        async with started(command, there, prefix=hidden, surroundings=home) as guest:
            assert await guest.wait() == 1
        assert "reward is user code" in (there / "out").read_text()
        (there / "reward.py").write_text("def letters(task, episode):\n    return 1.0\n")
        async with started([*command, "--reward", "reward.py:letters"], there, prefix=hidden, surroundings=home) as guest:
            assert await guest.wait() == 2
        assert "run demo was started" in (there / "out").read_text()
        shutil.copy(here / "reward.py", there / "reward.py")
        async with started([*command, "--reward", "reward.py:letters"], there, prefix=hidden, surroundings=home) as guest:
            await until(lambda: trained(here) >= 20 or guest.returncode is not None, up, here)
            assert guest.returncode is None, (there / "out").read_text()
            guest.terminate()
            assert await guest.wait() == 0
        assert "has left run demo" in (there / "out").read_text()
    logs = [path.name for path in (there / "runs" / "attached" / "demo" / "logs").iterdir()]
    # The refused one's presence may still be there when the next one takes its name.
    assert set(logs) <= {"producer-0.log", "producer-1.log"} and logs
