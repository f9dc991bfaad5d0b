"""The engine's side of a weight update: watch for manifests, stage one in the background, commit it between two forward passes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

import msgspec

from streamrl.bus.protocol import Bus, Message
from streamrl.consumers.serving.weight_choice import choose_latest, choose_pinned
from streamrl.errors import BusError, BusUnavailable, LogTruncated, NotFound, SchemaError, WeightSyncError
from streamrl.runtime.retries import pause_s
from streamrl.schemas.codec import decode
from streamrl.schemas.subjects import WEIGHTS, Subjects
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.manifest import offers
from streamrl.weights.pins import Pins
from streamrl.weights.protocol import Commit, SourceHost, WeightHost, WeightTransport

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 10.0
_LATE = 16
"""Manifests before the last one that are looked at: one of a trainer that was replaced may have come after those of its successor."""
_FAILURE_CHARS = 300


class Unreachable(WeightSyncError):
    """The bytes of a version cannot be reached from here."""


class _Announced(msgspec.Struct, frozen=True):
    """What is looked at of a manifest that is not to be taken yet."""

    run: str
    policy: str
    version: Version


class WeightWatcher:
    """Brings an engine to the newest version of its policy, and again each time a newer one is announced; skips those in between.

    With `pins` it serves pinned versions only: it takes the one that a holder has pinned for its `role`, stays with it until the
    pin is let go, and never moves by itself (see `streamrl.consumers.serving.weight_choice`).

    Generation goes on all the while: fetching and staging touch only the idle buffer. A version that cannot be taken (its bytes are
    retired, they do not have its digest, its publisher is dead) leaves the engine on what it serves; it is tried again
    with growing pauses, or given up as soon as a newer one is announced.

    Args:
        host: beside the engine's weights; a `SourceHost` is told where the bytes are, any other gets them.
        transports: by name, in order of preference; the first that holds a manifest's bytes is used.
        engine: the engine's id, for logs and events, and as the holder of its own pins.
        metrics: gets `weights/stage_s`, `weights/bytes_total`, `engine/swaps_total` and `engine/swap_ms` of each version taken.
        event: gets the kind `weights` and its detail for each version taken or failed.
        committed: awaited after each commit (the engine announces what it serves).
        backoff_s: first pause after a failure.
        delay_versions: serve the version this many before the newest one (the first, while there are not that many).
        pins: of the policy; None: the newest version is served.
        role: of the engine; pins for other roles are not looked at.
    """

    def __init__(
        self,
        bus: Bus,
        subjects: Subjects,
        host: WeightHost,
        transports: Mapping[str, WeightTransport],
        *,
        policy: str,
        engine: str,
        metrics: Callable[[dict[str, float]], Awaitable[None]] | None = None,
        event: Callable[[str, dict[str, Any]], Awaitable[None]] | None = None,
        committed: Callable[[Version], Awaitable[None]] | None = None,
        backoff_s: float = 0.5,
        delay_versions: int = 0,
        pins: Pins | None = None,
        role: str = "",
    ) -> None:
        self._bus = bus
        self._run = subjects.run
        self._subject = subjects.weights(policy)
        self._policy = policy
        self._host = host
        self._transports = transports
        self._engine = engine
        self._metrics = metrics
        self._event = event
        self._committed = committed
        self._backoff_s = backoff_s
        self._delay_versions = delay_versions
        self._pins = pins
        self._role = role
        self._pinned: set[tuple[Version, str]] = set()
        """Versions that are to be served here, with their holders."""
        self._announced: dict[Version, int] = {}
        """Sequence of each manifest that may still be wanted."""
        self._received: Manifest | None = None
        """The newest of them."""
        self._changed = asyncio.Event()
        self.serving: Version | None = None
        """The version committed last; None before the first."""
        self.failure = ""
        """Why the newest version that was to be taken could not be; empty: it was, or none has come."""

    async def run(self) -> None:
        """Watch until cancelled; raises only what no other version can cure (the bus refuses to be read, a bug in the host)."""
        listening = asyncio.create_task(self._listen(), name="weights-listen")
        following = asyncio.create_task(self._follow(), name="weights-follow")
        tasks = [listening, following]
        if self._pins is not None:
            tasks.append(asyncio.create_task(self._listen_to_pins(self._pins), name="weights-pins"))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Take note of every manifest that is announced. The engine goes on with what it serves while the bus is away."""
        while True:
            try:
                # The state first: a manifest stored between the two calls is then either the last one or after `end`.
                state = await self._bus.state(WEIGHTS)
                end = state.last
                last = await self._bus.last(self._subject)
                if last is not None:
                    every = self._delay_versions or self._pins is not None
                    first = state.first if every else max(state.first, last.sequence - _LATE)
                    await self._remember(first, last.sequence)
                if last is not None:
                    await self._consider(last)
                    end = last.sequence
                async for message in self._bus.read(WEIGHTS, after=end, subject=self._subject):
                    await self._consider(message)
            except LogTruncated as error:
                logger.info("event=weights_manifests_trimmed engine=%s needed=%s action=take_the_newest", self._engine, error.needed)
            except BusUnavailable as error:
                logger.warning("event=weights_bus_away engine=%s serving=%s error=%s", self._engine, self.serving, error.message)
                await asyncio.sleep(self._backoff_s)

    async def _listen_to_pins(self, pins: Pins) -> None:
        async for pin in pins.watch():
            wanted = pin.live and pin.role == self._role
            # Renewals, and this engine's own pins, change nothing: they must not end the pause after a failure.
            if wanted != ((pin.version, pin.holder) in self._pinned):
                self._pinned ^= {(pin.version, pin.holder)}
                self._changed.set()

    async def _remember(self, first: int, before: int) -> None:
        """Take note of what had been announced earlier than message `before`: it may still be to be served."""
        async for message in self._bus.read(WEIGHTS, after=first - 1, subject=self._subject):
            if message.sequence >= before:
                return
            try:
                announced = decode(bytes(message.body), _Announced, where=f"{message.subject} sequence {message.sequence}")
            except SchemaError as error:
                await self._failed(None, error)
                continue
            self._announced[announced.version] = message.sequence

    async def _consider(self, message: Message) -> None:
        where = f"{message.subject} sequence {message.sequence}"
        try:
            manifest = decode(bytes(message.body), Manifest, where=where)
            if (manifest.run, manifest.policy) != (self._run, self._policy):
                raise SchemaError(
                    f"expected a manifest of {self._run}/{self._policy} at {where}, got one of {manifest.run}/{manifest.policy}"
                )
        except SchemaError as error:
            await self._failed(None, error)
            return
        # A version that is announced again has new bytes: the old ones were lost.
        self._announced[manifest.version] = message.sequence
        if self._received is None or manifest.version >= self._received.version:
            self._received = manifest
        self._changed.set()

    def _choose(self) -> Version | None:
        """The version to take now, if there is one; what is older than it will not be wanted any more."""
        if self._pins is not None:
            chosen = choose_pinned(self._announced, {version for version, _ in self._pinned}, self.serving)
            oldest = self.serving
        else:
            chosen = oldest = choose_latest(self._announced, self._delay_versions)
        if oldest is not None:
            self._announced = {version: sequence for version, sequence in self._announced.items() if version >= oldest}
        return None if chosen is not None and self.serving is not None and chosen <= self.serving else chosen

    async def _follow(self) -> None:
        failures = 0
        while True:
            self._changed.clear()
            version = self._choose()
            if version is None:
                await self._changed.wait()
                continue
            try:
                await self._take(await self._manifest(version))
            except (WeightSyncError, BusError) as error:
                await self._failed(version, error)
                if isinstance(error, Unreachable) and self._pins is not None:
                    # The next version stands for one that is gone.
                    self._announced.pop(version, None)
                    continue
                failures += 1
                # A new announcement ends the pause at once.
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), pause_s(failures, first_s=self._backoff_s, most_s=MAX_BACKOFF_S))
            else:
                failures = 0

    async def _manifest(self, version: Version) -> Manifest:
        if self._received is not None and self._received.version == version:
            return self._received
        sequence = self._announced[version]
        try:
            message = await self._bus.fetch(WEIGHTS, sequence)
            return decode(bytes(message.body), Manifest, where=f"{message.subject} sequence {sequence}")
        except (NotFound, SchemaError) as error:
            raise Unreachable(f"{self._policy} {version}: its manifest, sequence {sequence}, cannot be had: {error.message}") from error

    async def _take(self, announced: Manifest) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._pins is not None:
                # Its holder may have pinned a version that this one stands for.
                await stack.enter_async_context(self._pins.held(announced.version, self._engine))
            manifest = await self._pick(announced)
            started = time.monotonic()
            digest = await self._stage(manifest)
            stage_s = time.monotonic() - started
        if digest != manifest.digest:
            raise WeightSyncError(
                f"{self._policy} {manifest.version}: expected staged weights with digest {manifest.digest}, got {digest}",
                version=str(manifest.version),
            )
        commit = await self._host.commit(manifest.version)
        self.serving, self.failure = manifest.version, ""
        await self._report(manifest, commit, stage_s)

    async def _stage(self, manifest: Manifest) -> str:
        transport = self._transports[manifest.transport]
        wants = self._host.wants(manifest)
        if isinstance(self._host, SourceHost):
            async with transport.source(manifest) as source:
                return await self._host.stage_from(manifest, source)
        parts = transport.fetch(manifest, wants)
        try:
            return await self._host.stage(manifest, parts)
        finally:
            # The transport is free again even if the host did not take all.
            if isinstance(parts, AsyncGenerator):
                await parts.aclose()

    async def _pick(self, announced: Manifest) -> Manifest:
        """The manifest for the first transport that reaches its bytes."""
        by_name = {manifest.transport: manifest for manifest in offers(announced)}
        for name, transport in self._transports.items():
            if name in by_name and await transport.holds(by_name[name]):
                return by_name[name]
        raise Unreachable(
            f"{self._policy} {announced.version}: expected its bytes on {' or '.join(by_name)}, they cannot be reached from here",
            hint="normal for a version that newer ones have replaced; on another host than the trainer's set weights.also_on_bus = true",
            version=str(announced.version),
        )

    async def _report(self, manifest: Manifest, commit: Commit, stage_s: float) -> None:
        # Between two hosts' clocks; for people only.
        lag_s = max(0.0, time.time() - manifest.published_s)
        logger.info(
            "event=weights_%s engine=%s policy=%s version=%s transport=%s bytes=%d stage_s=%.3f commit_ms=%.3f lag_s=%.3f",
            "committed" if commit.committed else "already_newer",
            self._engine,
            self._policy,
            manifest.version,
            manifest.transport,
            manifest.nbytes,
            stage_s,
            commit.took_ms,
            lag_s,
        )
        if not commit.committed:
            return
        if self._committed is not None:
            await self._committed(manifest.version)
        if self._metrics is not None:
            await self._metrics(
                {
                    "weights/stage_s": stage_s,
                    "weights/bytes_total": float(manifest.nbytes),
                    "engine/swaps_total": 1.0,
                    "engine/swap_ms": commit.took_ms,
                }
            )
        if self._event is not None:
            detail = {
                "engine": self._engine,
                "version": str(manifest.version),
                "transport": manifest.transport,
                "bytes": manifest.nbytes,
                "stage_s": stage_s,
                "commit_ms": commit.took_ms,
                "lag_s": lag_s,
                "digest": manifest.digest,  # of the staged bytes too, or they would not be served
            }
            await self._event("weights", detail)

    async def _failed(self, version: Version | None, error: WeightSyncError | BusError | SchemaError) -> None:
        logger.warning(
            "event=weights_not_taken engine=%s version=%s serving=%s reason=%s", self._engine, version, self.serving, error.message
        )
        self.failure = f"{version or 'a manifest'} could not be taken: {' '.join(error.message.split())[:_FAILURE_CHARS]}"
        if self._event is not None:
            detail = {"engine": self._engine, "version": str(version or ""), "error": error.message, "serving": str(self.serving or "")}
            await self._event("weights", detail)
