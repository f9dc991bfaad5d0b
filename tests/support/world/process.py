"""One service of a run in a process of its own, with a fuse in its seams and, on request, one planted fault."""

import asyncio
import contextlib
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.bus import BusAddress, connect
from streamrl.consumers.training import loop
from streamrl.consumers.training.steps import Books, Stepped
from streamrl.core.state import FoldState
from streamrl.errors import Fenced
from streamrl.runtime.kinds import MAINS
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import Worker
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Position
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from tests.support.world.fuse import Fuse, Fused, FusedBus, FusedTrainer, Spot, Wrapped


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


Call = Callable[[Coroutine[Any, Any, Any]], Any]


def plant(name: str, bus: FusedBus, module: Any, run: str) -> FusedBus:
    """The bus that the service gets; `module` is the one its `main` lies in. Called in the loop that the bus lives in."""
    if name:
        running = asyncio.get_running_loop()
        MUTANTS[name](bus, module, run, lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, running).result())
    return bus


def saving(module: Any, save: Callable[[Any, Path, bytes, dict[str, Any]], Future[None]]) -> None:
    """Trainers that save as `save` does; its first argument is the real one."""
    make = module.make_trainer

    class Trainer(Wrapped):
        def save(self, path: Path, extra: bytes, **options: Any) -> Future[None]:
            return save(self.inner, path, extra, options)

    module.make_trainer = lambda *given, **named: Trainer(make(*given, **named), Fuse(None))


def position_before_checkpoint(bus: FusedBus, module: Any, run: str, call: Call) -> None:
    """The position moves as soon as a snapshot begins, before its files are complete and pointed to."""

    class Keys(Wrapped):
        async def put(self, key: str, value: bytes, **options: Any) -> int:
            return 0 if key.startswith(PREFIX_POSITIONS) else await self.inner.put(key, value, **options)  # moved already

    def save(trainer: Any, path: Path, extra: bytes, options: dict[str, Any]) -> Future[None]:
        state = FoldState.decode(extra)
        call(keys.put(f"{PREFIX_POSITIONS}main", encode(Position("main", SAMPLES, state.oldest_needed, state.version))))
        return trainer.save(path, extra, **options)

    keys = bus.kv.inner
    bus.kv = Keys(bus.kv, bus.fuse)
    saving(module, save)


def publish_before_ledger(bus: FusedBus, module: Any, run: str, call: Call) -> None:
    """A version goes to the engines before its entry is durable."""
    make_trainer, make_publisher, make_books = module.make_trainer, module.make_publisher, loop.ledger_books
    made: dict[str, Any] = {}

    def keeping(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **named: made.setdefault(name, make(*given, **named))

    def announced() -> Version:
        newest = call(bus.last(Subjects(run).weights("policy")))
        return decode(newest.body, Manifest).version if newest else Version()

    def early_books(*parts: Any, **options: Any) -> Books:
        books = make_books(*parts, **options)

        def enter(stepped: Stepped) -> Version:
            version = stepped.state.version
            if stepped.past is None:
                made["publisher"].offer(version, stepped.result.digest, made["trainer"].shards())
                while announced() < version:
                    time.sleep(0.005)
            return books.enter(stepped)

        return Books(books.at, enter)

    module.make_trainer, module.make_publisher = keeping("trainer", make_trainer), keeping("publisher", make_publisher)
    loop.ledger_books = early_books


def retired_set_missing(bus: FusedBus, module: Any, run: str, call: Call) -> None:
    """The checkpoint holds the watermark, but not which tasks above it have ended."""

    def save(trainer: Any, path: Path, extra: bytes, options: dict[str, Any]) -> Future[None]:
        return trainer.save(path, replace(FoldState.decode(extra), retired_above=frozenset()).encode(), **options)

    saving(module, save)


def acked_on_receipt(bus: FusedBus, module: Any, run: str, call: Call) -> None:
    """A producer takes a task off the queue when it gets it."""
    claim = bus.claim

    class Done(Wrapped):
        async def done(self) -> None:
            """Nothing is left to do."""

        async def keep(self) -> None:
            """Nothing is left to keep."""

        async def retry(self, delay_s: float = 0.0) -> None:
            """Nothing is left to give back."""

    async def acked(source: str, **options: Any) -> list[Done]:
        leases = await claim(source, **options)
        for lease in leases:
            await lease.inner.done()
        return [Done(lease.inner, bus.fuse) for lease in leases]

    bus.claim = acked  # type: ignore[method-assign]


MUTANTS = {
    "position before checkpoint": position_before_checkpoint,
    "publish before ledger": publish_before_ledger,
    "retired set missing": retired_set_missing,
    "acked on receipt": acked_on_receipt,
}
"""The fifth, `discard=old`, is a setting of the stream; its test makes the stream so."""
