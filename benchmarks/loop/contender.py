"""One run of one loop, in the process that a benchmark starts for it.

Run as `python -m benchmarks.loop.contender WAY CONFIG.json OUT.json [page]`; writes a list of `Trained`. `page`: the stream's
is served.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import math
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.loop.links import EngineEnd, QueueLink, TrainerEnd
from benchmarks.loop.plain import Trained, roll_out, train
from benchmarks.loop.ways import Way
from benchmarks.processes import child
from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Log
from streamrl.config.load import from_json
from streamrl.config.tree import Config
from streamrl.data.model import ensure_model
from streamrl.errors import LaunchError
from streamrl.history.replay_log import read_past
from streamrl.launch.up import up
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.collection import collect_rarely
from streamrl.runtime.kinds import load_main
from streamrl.runtime.run_bus import open_bus
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import die_with_parent
from streamrl.runtime.worker import Worker
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import MAIN_SOURCE, Subjects
from streamrl.weights.factory import free_weights

TRAINER_HALF = "trainer-half"
"""The second process of `Way.PIPES`: its socket's number stands in place of the output file."""


async def stream(config: Config, *, page: bool = False) -> list[Trained]:
    """The whole product; what it trained is read from the ledger afterwards."""
    outcome = await up(config, PlainLines(io.StringIO(), every_s=math.inf), page=page)
    if outcome.exit_code != 0 or outcome.state != "finished":
        raise LaunchError(f"the run {config.run.name}: expected it to finish, got {outcome.state}", hint=f"see {outcome.run.logs}")
    async with open_bus(outcome.run) as bus:
        return await _of_ledger(bus, config)


async def memory(config: Config) -> list[Trained]:
    """The product's services on one event loop (their threads beside it) over the bus in memory."""
    run = RunDir(Path(config.run.dir) / config.run.name)
    run.create()
    run.write_config(config)
    bus = MemoryBus(config.run.name, config.bus)
    ensure_model(config, run.model_dir)
    workers = {
        kind: Worker(config=config, run_dir=run, bus=bus, kind=kind, index=0) for kind in ("engine", "producer", "feeder", "trainer")
    }
    tasks = {kind: asyncio.ensure_future(load_main(kind)(worker)) for kind, worker in workers.items()}
    await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
    for worker in workers.values():
        worker.draining.set()
    await asyncio.gather(*tasks.values())
    free_weights(config.weights, run.name, run.path)
    return await _of_ledger(bus, config)


async def queues(config: Config) -> list[Trained]:
    """Both halves in this process."""
    model_dir = _model(config)
    link = QueueLink(asyncio.get_running_loop())
    done: list[Trained] = []

    def train_then_close() -> None:
        try:
            train(config, model_dir, link, done.append)
        finally:
            link.close()

    training = asyncio.create_task(asyncio.to_thread(train_then_close))
    try:
        await roll_out(config, model_dir, link)
    finally:
        link.end()
        await asyncio.gather(training, return_exceptions=True)
    await training
    return done


async def pipes(config: Config, config_path: Path) -> list[Trained]:
    """The sampling half here, the training half in a process of its own."""
    model_dir = _model(config)
    ours, theirs = socket.socketpair()
    out = config_path.with_suffix(".trained.json")
    command = child("benchmarks.loop.contender", TRAINER_HALF, config_path, f"{theirs.fileno()}:{out}")
    training = await asyncio.create_subprocess_exec(*command["args"], env=command["env"], pass_fds=[theirs.fileno()])
    theirs.close()
    with ours:
        await roll_out(config, model_dir, EngineEnd(ours))
        code = await training.wait()
    if code != 0:
        raise LaunchError(f"the training process: expected exit code 0, got {code}", hint="its error stands above")
    return msgspec.json.decode(out.read_bytes(), type=list[Trained])


def train_half(config: Config, target: str) -> None:
    """The training half, in the process that `pipes` starts."""
    number, _, out = target.partition(":")
    done: list[Trained] = []
    with socket.socket(fileno=int(number)) as connection:
        link = TrainerEnd(connection)
        train(config, _model(config), link, done.append)
        Path(out).write_bytes(msgspec.json.encode(done))
        link.close()


def trained_of(entries: Sequence[LedgerEntry]) -> list[Trained]:
    """Batches of reinforcement learning as the ledger has them."""
    return [
        Trained(
            time_s=entry.time_s,
            samples=entry.num_samples,
            tokens=entry.num_tokens,
            staleness=entry.metrics["staleness/mean"],
            wait_s=entry.metrics["perf/wait_s"],
            step_s=entry.metrics["perf/step_s"],
        )
        for entry in entries
        if entry.source == MAIN_SOURCE
    ]


async def _of_ledger(bus: Log, config: Config) -> list[Trained]:
    past = await read_past(bus, Subjects(config.run.name), config.trainer.name)
    return trained_of(past.between(0, None))


def _model(config: Config) -> Path:
    return ensure_model(config, RunDir(Path(config.run.dir) / config.run.name).model_dir)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one way and write down its batches."""
    way, config_path, target, *page = sys.argv[1:] if argv is None else argv
    collect_rarely()
    die_with_parent(os.getppid())  # a benchmark that is ended leaves nothing running
    config = from_json(Path(config_path).read_text(encoding="utf-8"), where=config_path)
    if way == TRAINER_HALF:
        train_half(config, target)
        return 0
    if way != Way.STREAM and config.engine.kind == "local":
        # Two threads that import transformers for the first time at once get half of it.
        importlib.import_module("streamrl.engines.local.engine")
        importlib.import_module("streamrl.trainers.torch.trainer")
    runs = {
        Way.STREAM: lambda: stream(config, page=bool(page)),
        Way.MEMORY: lambda: memory(config),
        Way.QUEUES: lambda: queues(config),
        Way.PIPES: lambda: pipes(config, Path(config_path)),
    }
    Path(target).write_bytes(msgspec.json.encode(asyncio.run(runs[Way(way)]())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
