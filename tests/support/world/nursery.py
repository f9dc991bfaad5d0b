"""Forks services from one process that has imported everything and done nothing: a kill costs milliseconds, not an import.

Run as `python -m tests.support.world.nursery`: a line of JSON in (a `Request`), a line out when the child begins (its pid) and one when it
has ended (its exit code). `Nursery` is the other end.
"""

import asyncio
import contextlib
import gc
import importlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from tests.support.world.process import Request, end

MODULES = (
    "importlib.metadata",
    "pandas",  # which pyarrow looks for when it reads its first record
    "streamrl.consumers.training.worker",
    "streamrl.producers.rollouts",
    "streamrl.producers.gateway.worker",
    "streamrl.producers.rewarder",
    "streamrl.producers.feeder",
    "streamrl.producers.evaluation.worker",
    "streamrl.trainers.table.trainer",
)
TORCH = ("streamrl.trainers.torch.trainer", "transformers.models.qwen3.modeling_qwen3", "transformers.models.qwen3_moe.modeling_qwen3_moe")
"""Imports of a service whose trainer is torch's: they cost each child seconds of a processor, if the nursery has not made them."""
ROOT = Path(__file__).parents[3]


class Nursery:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.pid = 0
        """Process id of the child that runs, or ran last."""
        self.running = False

    async def run(self, request: Request) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(request) + b"\n")
        self.pid = int(await self._process.stdout.readline())
        self.running = True
        code = int(await self._process.stdout.readline())
        self.running = False
        return code


@contextlib.asynccontextmanager
async def nursery(log: Path, *modules: str) -> AsyncIterator[Nursery]:
    """A nursery that imports `modules` too, and whose children write what they have to say into `log`."""
    with log.open("ab") as file:
        words = (sys.executable, "-m", __name__, *modules)
        process = await asyncio.create_subprocess_exec(
            *words, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=file
        )
    made = Nursery(process)
    try:
        yield made
    finally:
        assert process.stdin is not None
        process.stdin.close()
        if made.running:  # a test that failed left it; the nursery ends only after its child
            with contextlib.suppress(ProcessLookupError):
                os.kill(made.pid, signal.SIGKILL)
        await process.wait()


def main() -> None:
    for name in (*MODULES, *sys.argv[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = msgspec.json.decode(line, type=Request)
        pid = os.fork()
        if pid == 0:
            end(request)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
