"""Five faults that the audit must find. Each bends one seam of a service from outside; the product has no switch for them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

from msgspec.structs import replace

from streamrl.consumers.training import loop
from streamrl.consumers.training.loop import LiveTrainer
from streamrl.consumers.training.steps import Books, Stepped
from streamrl.core.state import FoldState
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.control import Position
from streamrl.schemas.subjects import PREFIX_POSITIONS, SAMPLES
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from tests.support.world.fuse import Fuse, FusedKeys, FusedLease, Wrapped


def plant(name: str, bus: Any, module: ModuleType) -> Any:
    """The bus that the service gets; `module` is the one its `main` lies in."""
    return MUTANTS[name](bus, module) if name else bus


def position_before_checkpoint(bus: Any, module: ModuleType) -> Any:
    """The position moves as soon as a snapshot begins, before its files are complete and pointed to."""

    class Keys(FusedKeys):
        async def put(self, key: str, value: bytes, **options: Any) -> int:
            if key.startswith(PREFIX_POSITIONS):
                return 0  # moved already
            return await super().put(key, value, **options)

    bus.kv = Keys(bus.kv._inner, bus._fuse)
    make = module.make_trainer

    class Trainer(Wrapped):
        def save(self, path: Path, extra: bytes, **options: Any) -> Future[None]:
            state = FoldState.decode(extra)
            position = Position("main", SAMPLES, state.oldest_needed, state.version)
            self.call(bus.kv._inner.put(f"{PREFIX_POSITIONS}main", encode(position)))
            return self._inner.save(path, extra, **options)

        call: Callable[[Any], Any]

    def made(*given: Any, **named: Any) -> Any:
        trainer = Trainer(make(*given, **named), Fuse(None))
        made_trainers.append(trainer)
        return trainer

    made_trainers: list[Trainer] = []
    run = LiveTrainer.run

    def running(self: LiveTrainer, stop: Callable[[], bool]) -> Any:
        made_trainers[-1].call = self.call
        return run(self, stop)

    module.make_trainer = made
    LiveTrainer.run = running  # type: ignore[method-assign]
    return bus


def publish_before_ledger(bus: Any, module: ModuleType) -> Any:
    """A version goes to the engines before its entry is durable."""
    train, make = LiveTrainer._train, loop.ledger_books

    def training(self: LiveTrainer, *given: Any) -> bool:
        def early_books(*parts: Any, **options: Any) -> Books:
            books = make(*parts, **options)

            def enter(stepped: Stepped) -> Version:
                version = stepped.state.version
                if stepped.past is None:
                    self.publisher.offer(version, stepped.result.digest, self.trainer.shards())
                    while self.call(bus.last(self.subjects.weights("policy"))) is None or announced(self) < version:
                        time.sleep(0.005)
                return books.enter(stepped)

            return Books(books.at, enter)

        loop.ledger_books = early_books
        return train(self, *given)

    def announced(self: LiveTrainer) -> Version:
        return decode(self.call(bus.last(self.subjects.weights("policy"))).body, Manifest).version

    LiveTrainer._train = training  # type: ignore[method-assign]
    return bus


def retired_set_missing(bus: Any, module: ModuleType) -> Any:
    """The checkpoint holds the watermark, but not which tasks above it have ended."""
    make = module.make_trainer

    class Trainer(Wrapped):
        def save(self, path: Path, extra: bytes, **options: Any) -> Future[None]:
            return self._inner.save(path, replace(FoldState.decode(extra), retired_above=frozenset()).encode(), **options)

    module.make_trainer = lambda *given, **named: Trainer(make(*given, **named), Fuse(None))
    return bus


def acked_on_receipt(bus: Any, module: ModuleType) -> Any:
    """A producer takes a task off the queue when it gets it."""
    claim = bus.claim

    class Done(FusedLease):
        async def done(self) -> None:
            """Nothing is left to do."""

        async def keep(self) -> None:
            """Nothing is left to keep."""

        async def retry(self, delay_s: float = 0.0) -> None:
            """Nothing is left to give back."""

    async def acked(source: str, **options: Any) -> list[Done]:
        leases = await claim(source, **options)
        for lease in leases:
            await lease._inner.done()
        return [Done(lease._inner, bus._fuse) for lease in leases]

    bus.claim = acked
    return bus


MUTANTS = {
    "position before checkpoint": position_before_checkpoint,
    "publish before ledger": publish_before_ledger,
    "retired set missing": retired_set_missing,
    "acked on receipt": acked_on_receipt,
}
"""The fifth, `discard=old`, is a setting of the stream; its test makes the stream so."""
