"""One feeder on a bus in this process: `python -m benchmarks.data.first_task ROWS MODEL RUNS TASKS`; prints what it took as JSON."""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from pathlib import Path

from streamrl.bus.memory.bus import MemoryBus
from streamrl.config.load import convert
from streamrl.producers.feeder import main
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import encode
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import KEY_GRANTED, TASKS


async def measure(rows: str, model: str, runs: str, tasks: int) -> dict[str, float]:
    """Seconds from the feeder's start to its first and its last task, greatest resident MB, and MB of the index."""
    tree = {"run": {"name": "bench", "dir": runs}, "model": {"path": model}, "data": {"train": rows, "chat_template": False}}
    config = convert(tree, where="the benchmark")
    bus, run = MemoryBus("bench", config.bus), RunDir(Path(runs) / "bench")
    run.create()
    await bus.kv.put(KEY_GRANTED, encode(Grant(tasks, 0, 0)))
    worker = Worker(config=config, run_dir=run, bus=bus, kind="feeder", index=0)
    start = time.perf_counter()
    feeder = asyncio.create_task(main(worker))
    took: dict[str, float] = {}
    for name, wanted in (("first_s", 1), ("last_s", tasks)):
        while (await bus.state(TASKS)).last < wanted and not feeder.done():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        took[name] = time.perf_counter() - start
    worker.draining.set()
    await feeder
    index = sum(file.stat().st_size for file in run.data.glob("*.index"))
    return took | {"resident_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000, "index_mb": index / 1e6}


if __name__ == "__main__":
    _, given_rows, given_model, given_runs, given_tasks = sys.argv
    sys.stdout.write(json.dumps(asyncio.run(measure(given_rows, given_model, given_runs, int(given_tasks)))) + "\n")
