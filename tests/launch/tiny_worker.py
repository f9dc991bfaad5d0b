"""A worker without torch: `tiny_worker.py KIND RUN MODE`.

Any kind writes its process id to RUN/pids and, on SIGTERM, its kind to RUN/order. Mode `learn`: the trainer writes 30 ledger entries, two
evaluations and the end of the run; the evaluator is soon done. Modes `learn-slowly`: so that it takes seconds; `learn-and-stay`: without
the end. Mode `endless`: it waits. Mode `stubborn`: SIGTERM is ignored.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE, die_with_parent
from streamrl.runtime.worker import connected
from streamrl.schemas.codec import encode
from streamrl.schemas.events import Event
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import Subjects
from streamrl.schemas.versions import Version


async def learn(run: RunDir, mode: str) -> None:
    subjects = Subjects(run.name)
    async with connected(run) as bus:
        for number in range(1, 31):
            entry = LedgerEntry(
                run=run.name,
                trainer="main",
                version=Version(0, number),
                source="main",
                used=(),
                cursor=number,
                granted=0,
                retired=number,
                staleness=(1,),
                num_tokens=10,
                metrics={"rollout/raw_reward": number / 30},
                time_s=time.time(),
            )
            await bus.publish(subjects.ledger("main"), encode(entry), id=f"0.{number}")
            await asyncio.sleep(0.3 if mode == "learn-slowly" else 0.0)
        for version, accuracy in (("0.0", 0.125), ("0.30", 0.875)):
            problems = [{"prompt": "1+1=", "expected": "2", "got": "2" if accuracy > 0.5 else "5"}]
            detail = {"version": version, "versions": [version, version], "accuracy": accuracy, "num": 8, "problems": problems}
            event = Event(kind="evaluation", worker="evaluator-0", detail=detail)
            await bus.publish(subjects.events("evaluation"), encode(event))
        while mode == "learn-and-stay":
            await asyncio.sleep(600)
        await bus.publish(subjects.events("finished"), encode(Event(kind="finished", worker="trainer-0", detail={"version": "0.30"})))


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
