"""Wrappers around the seams that end the process at a chosen call: no clean-up, no flush, as `kill -9` would; or stop it there."""

import inspect
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
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
    """Passes every attribute on to `inner`; subclasses change some."""

    def __init__(self, inner: Any, fuse: Fuse) -> None:
        self.inner = inner
        self.fuse = fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Fused(Wrapped):
    """Passes every attribute on; before and after each call of the methods that `spots` has, the fuse is passed by."""

    def __init__(self, inner: Any, fuse: Fuse, **spots: str | Callable[[Any], str]) -> None:
        super().__init__(inner, fuse)
        self._spots = spots

    def __getattr__(self, name: str) -> Any:
        method, spot = getattr(self.inner, name), self._spots.get(name)
        if spot is None:
            return method

        def called(*given: Any, **named: Any) -> Any:
            says = spot if isinstance(spot, str) else spot(given[0])
            self.fuse.pass_by(says, "before")
            result = method(*given, **named)
            if inspect.isawaitable(result):
                return self._awaited(says, result)
            self.fuse.pass_by(says, "after")
            return result

        return called

    async def _awaited(self, says: str, call: Awaitable[Any]) -> Any:
        result = await call
        self.fuse.pass_by(says, "after")
        return result


def _of(name: str) -> Callable[[str], str]:
    """Name a spot at a stream; others than `tasks` are not told apart."""
    return lambda what: f"{name} {what}" if what == TASKS else name


def _keyed(name: str) -> Callable[[str], str]:
    return lambda key: f"{name} {key.split('/')[0]}"


def _stored(what: str) -> dict[str, str]:
    return {name: f"{name} {what}" for name in ("put", "get", "delete")}


class FusedBus(Fused):
    """Spots."""

    def __init__(self, bus: Bus, fuse: Fuse) -> None:
        streams = {"fetch": _of("fetch"), "first_from": _of("fetch"), "state": _of("state")}
        super().__init__(bus, fuse, publish=lambda subject: f"publish {kind_of(subject)}", trim="trim", **streams)
        self.kv: Wrapped = Fused(bus.kv, fuse, put=_keyed("put"), get=_keyed("get"))
        self.turns = Fused(bus.turns, fuse, put="put turn", values="read turns", remove="remove turns")
        self.blobs = Fused(bus.blobs, fuse, **_stored("blob"))
        self.sample_blobs = Fused(bus.sample_blobs, fuse, **_stored("sample blob"))

    async def read(self, stream: str, **options: Any) -> AsyncIterator[Any]:
        messages = self.inner.read(stream, **options)
        try:
            async for message in messages:
                self.fuse.pass_by(f"read {stream}", "before")
                yield message
                self.fuse.pass_by(f"read {stream}", "after")
        finally:
            await messages.aclose()

    async def claim(self, source: str, **options: Any) -> list[Any]:
        self.fuse.pass_by("claim", "before")
        leases = await self.inner.claim(source, **options)
        self.fuse.pass_by("claim", "after")
        return [Fused(lease, self.fuse, done="done") for lease in leases]


class FusedTrainer(Fused):
    """Spots: `step`, `shards`, `load`, `save` (the snapshot), `saved` (its files are in place)."""

    def __init__(self, trainer: Trainer, fuse: Fuse) -> None:
        super().__init__(trainer, fuse, step="step", shards="shards", load="load")

    def save(self, path: Path, extra: bytes, **options: Any) -> Future[None]:
        self.fuse.pass_by("save", "before")
        future = self.inner.save(path, extra, **options)
        self.fuse.pass_by("save", "after")
        if self.fuse.spot is not None and self.fuse.spot.name == "saved":
            future.result()
            self.fuse.pass_by("saved", "after")
        return future
