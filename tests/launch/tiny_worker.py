"""A worker without torch: `tiny_worker.py KIND RUN MODE`.

Any kind writes its process id to RUN/pids and, on SIGTERM, its kind to RUN/order. Mode `learn`: the trainer writes 30 ledger entries, two
evaluations and the end of the run; the evaluator is soon done. Mode `learn-and-stay`: without the end. Mode `learn-and-leave`: it ends with
exit code 0 after 12 of them when it is started for the first time. Mode `endless`: it waits. Mode `stubborn`: SIGTERM is ignored.
"""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE, Exit, die_with_parent


async def learn(run: RunDir, mode: str) -> None:
    from streamrl.runtime.worker import connected
    from streamrl.schemas.subjects import Subjects
    from tests.support.tiny import ended, evaluated, learned

    async with connected(run) as bus:
        if mode == "learn-and-leave" and await bus.last(Subjects(run.name).ledger("main")) is None:
            return await learned(bus, run.name, last=12)
        await learned(bus, run.name)
        await evaluated(bus, run.name, 0, 0.125)
        await evaluated(bus, run.name, 30, 0.875)
        while mode == "learn-and-stay":
            await asyncio.sleep(600)
        await ended(bus, 30)


def main() -> int:
    kind, path, mode = sys.argv[1:]
    die_with_parent(int(os.environ[SUPERVISOR_VARIABLE]))
    run = RunDir(path)

    def end(number: int, frame: object) -> None:
        append(run.path / "order", kind)
        sys.exit(Exit.DRAINED)

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
