"""One service of a run in a process of its own, with a fuse in its seams and, on request, one planted fault."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from streamrl.bus import BusAddress, connect
from streamrl.errors import Fenced
from streamrl.runtime.kinds import MAINS
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from tests.support.world.fuse import Fuse, Fused, FusedBus, FusedTrainer, Spot
from tests.support.world.mutants import plant


class Request(msgspec.Struct, frozen=True):
    kind: str
    run: str
    """Path of the run directory."""
    spot: Spot | None = None
    mutant: str = ""


async def serve(request: Request) -> None:
    run = RunDir(request.run)
    config = run.load_config()
    fuse = Fuse(request.spot)
    bus = await connect(BusAddress.load(run.bus_path), config.run.name, config.bus, create=False)
    module_name, _, function = MAINS[request.kind].partition(":")
    module: Any = importlib.import_module(module_name)
    if request.kind == "trainer":
        make_trainer, make_publisher = module.make_trainer, module.make_publisher
        module.make_trainer = lambda *given, **named: FusedTrainer(make_trainer(*given, **named), fuse)
        module.make_publisher = lambda *given, **options: Fused(make_publisher(*given, **options), fuse, offer="offer", close="close")
    if request.kind == "evaluator":
        open_store = module.open_store

        @contextlib.contextmanager
        def fused(*given: Any) -> Iterator[Fused]:
            with open_store(*given) as store:
                yield Fused(store, fuse, add="store")

        module.open_store = fused
    seams: Any = plant(request.mutant, FusedBus(bus, fuse), module, config.run.name)
    try:
        worker = Worker(config=config, run_dir=run, bus=seams, kind=request.kind, index=0)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, worker.draining.set)
        await getattr(module, function)(worker)
    finally:
        await bus.close()


def end(request: Request) -> None:
    """Run the service and end this process: 0 done, 3 fenced, 1 any error (printed), 99 at the fuse."""
    code = 1
    try:
        asyncio.run(serve(request))
        code = 0
    except Fenced:
        code = 3
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
