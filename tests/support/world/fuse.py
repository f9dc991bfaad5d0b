"""Wrappers around the seams that end the process at a chosen call: no clean-up, no flush, as `kill -9` would; or stop it there."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from streamrl.bus.protocol import Bus
from streamrl.schemas.subjects import TASKS, kind_of
from streamrl.trainers.protocol import Trainer

WHENS = ("before", "after")
BLOWN = 99
"""Exit code of a process that ended at its fuse."""


class Spot(msgspec.Struct, frozen=True):
    """Where a process ends: before or after the `count`-th call that `name` names, such as `publish ledger` or `step`."""

    name: str
    when: str = "before"
    count: int = 1
    stops: bool = False
    """It does not end there: it stops, until somebody sends SIGCONT."""

    def __str__(self) -> str:
        return f"{self.when} {self.name} {self.count}"


def around(*names: str, counts: tuple[int, ...] = (1,)) -> list[Spot]:
    """Before and after these calls."""
    return [Spot(name, when, count) for count in counts for name in names for when in WHENS]


class Fuse:
    """Counts calls and ends the process at its spot."""

    def __init__(self, spot: Spot | None) -> None:
        self.spot = spot
        self._calls = 0
        self._lock = threading.Lock()

    def pass_by(self, name: str, when: str) -> None:
        """Call it before and after each wrapped call."""
        if self.spot is None or (self.spot.name, self.spot.when) != (name, when):
            return
        with self._lock:
            self._calls += 1
            if self._calls != self.spot.count:
                return
            if not self.spot.stops:
                os._exit(BLOWN)
            os.kill(os.getpid(), signal.SIGSTOP)


class Wrapped:
    """Passes every attribute on to `inner`; subclasses wrap some."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self.inner = inner
        self.fuse = fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def _awaited(self, name: str, call: Callable[[], Any]) -> Any:
        self.fuse.pass_by(name, "before")
        result = await call()
        self.fuse.pass_by(name, "after")
        return result

    def _called(self, name: str, call: Callable[[], Any]) -> Any:
        self.fuse.pass_by(name, "before")
        result = call()
        self.fuse.pass_by(name, "after")
        return result


class FusedBus(Wrapped):
    """Spots: `publish <kind>`, `read <stream>` (each message), `fetch`, `state` (`fetch tasks`, `state tasks`), `trim`, `claim`, `done`,
    `put <key>`, `get <key>`, `put turn`, `read turns`, `remove turns`, and `put`, `get`, `delete` of a `blob` or a `sample blob`."""

    def __init__(self, bus: Bus, fuse: Fuse) -> None:
        super().__init__(bus, fuse)
        self.kv = FusedKeys(bus.kv, fuse)
        self.turns = FusedTurns(bus.turns, fuse)
        self.blobs = FusedBlobs(bus.blobs, fuse)
        self.sample_blobs = FusedBlobs(bus.sample_blobs, fuse, "sample blob")

    async def publish(self, subject: str, body: bytes, **options: Any) -> Any:
        return await self._awaited(f"publish {kind_of(subject)}", lambda: self.inner.publish(subject, body, **options))

    async def read(self, stream: str, **options: Any) -> AsyncIterator[Any]:
        messages = self.inner.read(stream, **options)
        try:
            async for message in messages:
                self.fuse.pass_by(f"read {stream}", "before")
                yield message
                self.fuse.pass_by(f"read {stream}", "after")
        finally:
            await messages.aclose()

    async def fetch(self, stream: str, sequence: int) -> Any:
        return await self._awaited(_of("fetch", stream), lambda: self.inner.fetch(stream, sequence))

    async def first_from(self, stream: str, sequence: int, **options: Any) -> Any:
        return await self._awaited(_of("fetch", stream), lambda: self.inner.first_from(stream, sequence, **options))

    async def state(self, stream: str) -> Any:
        return await self._awaited(_of("state", stream), lambda: self.inner.state(stream))

    async def trim(self, stream: str, **options: Any) -> None:
        await self._awaited("trim", lambda: self.inner.trim(stream, **options))

    async def claim(self, source: str, **options: Any) -> list[FusedLease]:
        leases = await self._awaited("claim", lambda: self.inner.claim(source, **options))
        return [FusedLease(lease, self.fuse) for lease in leases]


def _of(name: str, stream: str) -> str:
    return f"{name} {stream}" if stream == TASKS else name


class FusedLease(Wrapped):
    """A claimed task."""

    async def done(self) -> None:
        await self._awaited("done", self.inner.done)


class FusedKeys(Wrapped):
    """Keys are named by their first part: `granted`, `latest`, `positions`, `fences`."""

    async def put(self, key: str, value: bytes, **options: Any) -> int:
        return await self._awaited(f"put {key.split('/')[0]}", lambda: self.inner.put(key, value, **options))

    async def get(self, key: str) -> Any:
        return await self._awaited(f"get {key.split('/')[0]}", lambda: self.inner.get(key))


class FusedStore(Wrapped):
    """The answers of a set of problems; its spot is `store`."""

    def add(self, record: Any) -> None:
        self._called("store", lambda: self.inner.add(record))


class FusedTurns(Wrapped):
    """The journals of sessions."""

    async def put(self, key: str, value: bytes, **options: Any) -> int:
        return await self._awaited("put turn", lambda: self.inner.put(key, value, **options))

    async def values(self, prefix: str) -> Any:
        return await self._awaited("read turns", lambda: self.inner.values(prefix))

    async def remove(self, prefix: str) -> None:
        await self._awaited("remove turns", lambda: self.inner.remove(prefix))


class FusedBlobs(Wrapped):
    """Spots are called by what they store."""

    def __init__(self, inner: Any, fuse: Fuse, what: str = "blob") -> None:
        super().__init__(inner, fuse)
        self._what = what

    async def put(self, name: str, data: Any) -> str:
        return await self._awaited(f"put {self._what}", lambda: self.inner.put(name, data))

    async def get(self, name: str) -> bytes:
        return await self._awaited(f"get {self._what}", lambda: self.inner.get(name))

    async def delete(self, name: str) -> None:
        await self._awaited(f"delete {self._what}", lambda: self.inner.delete(name))


class FusedTrainer(Wrapped):
    """Spots: `step`, `shards`, `load`, `save` (the snapshot), `saved` (its files are in place)."""

    def __init__(self, trainer: Trainer, fuse: Fuse) -> None:
        super().__init__(trainer, fuse)

    def step(self, batch: Any) -> Any:
        return self._called("step", lambda: self.inner.step(batch))

    def shards(self) -> Iterator[Any]:
        return self._called("shards", self.inner.shards)

    def load(self, path: Path) -> bytes:
        return self._called("load", lambda: self.inner.load(path))

    def save(self, path: Path, extra: bytes, **options: Any) -> Future[None]:
        future: Future[None] = self._called("save", lambda: self.inner.save(path, extra, **options))
        if self.fuse.spot is not None and self.fuse.spot.name == "saved":
            future.result()
            self.fuse.pass_by("saved", "after")
        return future


class FusedPublisher(Wrapped):
    """Spots: `offer`, `close`."""

    def offer(self, *arguments: Any) -> None:
        self._called("offer", lambda: self.inner.offer(*arguments))

    def close(self, *arguments: Any) -> None:
        self._called("close", lambda: self.inner.close(*arguments))
