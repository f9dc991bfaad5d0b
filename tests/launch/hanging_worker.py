"""A real worker whose `main` hangs as told: `hanging_worker.py RUN INDEX HOW`. It writes HOW to RUN/over when it comes to its end."""

import asyncio
import sys
import time

from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker, run_worker

HANGS_S = 6.0


def compute() -> None:
    """A step that needs the interpreter all the time."""
    end_s = time.monotonic() + HANGS_S
    while time.monotonic() < end_s:
        sum(range(1000))


async def main(worker: Worker, how: str) -> None:
    if how == "loads":
        hold_the_loop(HANGS_S)
    if how == "blocks at once":
        await asyncio.sleep(0.1)
    worker.state = "running"
    if how == "blocks at once":
        hold_the_loop(600)
    if how == "steps":
        await asyncio.to_thread(compute)
    if how == "blocks":
        await asyncio.sleep(0.1)
        hold_the_loop(600)
    if how != "waits":
        (worker.run_dir.path / "over").write_text(how)
    await worker.draining.wait()


def hold_the_loop(seconds: float) -> None:
    time.sleep(seconds)


if __name__ == "__main__":
    path, number, how = sys.argv[1:]
    sys.exit(run_worker("producer", RunDir(path), int(number), main=lambda worker: main(worker, how)))
