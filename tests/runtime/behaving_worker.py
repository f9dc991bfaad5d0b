"""A worker whose `main` behaves as told: `behaving_worker.py RUN INDEX BEHAVIOUR...` (INDEX `-`: the first free one).

Of several behaviours each exit code is printed.
"""

import asyncio
import sys

from streamrl.errors import BusError, ConfigError, Fenced
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker, run_worker
from streamrl.telemetry.clock import StateClock


async def wait_for_drain(worker: Worker) -> None:
    print(worker.name, flush=True)
    await worker.draining.wait()
    print("drained", flush=True)


async def be_timed(worker: Worker) -> None:
    worker.timed("producer", StateClock("setup"))
    await wait_for_drain(worker)


async def ignore_drain(worker: Worker) -> None:
    print(worker.name, flush=True)
    await worker.draining.wait()
    print("draining", flush=True)
    await asyncio.sleep(600)


async def report(worker: Worker) -> None:
    await worker.metrics({"train/loss": 1.5})
    await worker.event("evaluation", {"accuracy": 0.5})


async def fail(worker: Worker) -> None:
    raise BusError("the stream is gone", hint="make it again")


async def fail_in_group(worker: Worker) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(refuse(worker))


async def refuse(worker: Worker) -> None:
    raise ConfigError("tasks.batch_tasks must be even", hint="take 64")


async def be_fenced(worker: Worker) -> None:
    raise Fenced("another trainer has fence 7")


async def crash(worker: Worker) -> None:
    raise ZeroDivisionError("an unexpected end")


async def leave(worker: Worker) -> None:
    await asyncio.to_thread(sys.exit, 0)


BEHAVIOURS = {
    "wait": wait_for_drain,
    "timed": be_timed,
    "ignore": ignore_drain,
    "report": report,
    "fail": fail,
    "group": fail_in_group,
    "refuse": refuse,
    "fence": be_fenced,
    "crash": crash,
    "leave": leave,
}

if __name__ == "__main__":
    path, number, *behaviours = sys.argv[1:]
    index = None if number == "-" else int(number)
    codes = [run_worker("producer", RunDir(path), index, main=BEHAVIOURS[behaviour]) for behaviour in behaviours]
    if len(codes) > 1:
        print(*map(int, codes))
    sys.exit(codes[-1])
