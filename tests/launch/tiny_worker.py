"""A worker without torch: `tiny_worker.py KIND RUN MODE`.

Any kind writes its process id to RUN/pids and, on SIGTERM, its kind to RUN/order. Mode `learn`: the trainer writes 30 ledger entries, two
evaluations and the end of the run; the evaluator is soon done. Mode `learn-and-stay`: without the end. Mode `endless`: it waits. Mode
`stubborn`: SIGTERM is ignored.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE, die_with_parent


async def learn(run: RunDir, mode: str) -> None:
    from streamrl.runtime.worker import connected
    from streamrl.schemas.codec import encode
    from streamrl.schemas.events import Event
    from streamrl.schemas.subjects import Subjects
    from tests.support.tiny import evaluated, learned

    async with connected(run) as bus:
        await learned(bus, run.name)
        await evaluated(bus, run.name, 0, 0.125)
        await evaluated(bus, run.name, 30, 0.875)
        while mode == "learn-and-stay":
            await asyncio.sleep(600)
        finished = Event(kind="finished", worker="trainer-0", detail={"version": "0.30"})
        await bus.publish(Subjects(run.name).events("finished"), encode(finished))


def main() -> int:
    kind, path, mode = sys.argv[1:]
    die_with_parent(int(os.environ[SUPERVISOR_VARIABLE]))
    run = RunDir(path)

    def end(number: int, frame: object) -> None:
        append(run.path / "order", kind)
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "stubborn" else end)
    append(run.path / "pids", str(os.getpid()))
    if kind == "trainer" and mode.startswith("learn"):
        asyncio.run(learn(run, mode))
        return 0
    if kind == "evaluator" and mode.startswith("learn"):
        return 0
    while True:
        time.sleep(600)


def append(path: Path, line: str) -> None:
    with path.open("a") as file:
        print(line, file=file)


if __name__ == "__main__":
    sys.exit(main())
