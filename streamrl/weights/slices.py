"""One version published by several ranks: each stores its slices when rank 0 asks for them, and rank 0 announces what they make together.

```text
rank 0     offer ── order: take slices of v ──▶ ... asks for v ─ stores its own ─────────── merges ─ manifest
rank r     ◀─ keeps its slices of v ┘                 └─▶ stores its own ─ says where ─┘
              (what rank 0 has replaced is let go)     keys ranks/wanted-<policy>, ranks/stored-<policy>-<r>-<transport>
```
Each transport is answered for by itself, so that rank 0 begins its upload to the bus while the others do theirs.
No rank sees another's bytes. Rank 0 alone decides which versions are published, so all ranks store the same ones in the same order.
Ranks are restarted together; what those before have said is known by its word.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol, TypeVar, cast

import msgspec

from streamrl.bus.protocol import KeyEntry, KeyValue
from streamrl.errors import SchemaError, StreamRLError, WeightSyncError
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.subjects import PREFIX_RANKS, check_name
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Manifest, StoredSlices, WantedSlices
from streamrl.weights.protocol import CudaSource, FileSource, Part, RankTransport, Shard, Slice, WeightTransport

logger = logging.getLogger(__name__)

T = TypeVar("T")

SIGN_S = 0.25
"""Between two signs of a rank whose bytes are on their way."""


class SliceTransport(WeightTransport, RankTransport, Protocol):
    """A transport that several ranks can publish on together. Adapters: `ipc`, `shm`, `bus`."""


class OtherRanks(msgspec.Struct, frozen=True):
    """What rank 0 knows of the ranks that have a part of what it publishes."""

    count: int
    """They are ranks 1 .. `count`."""
    order: Callable[[str, Version, Sequence[Version]], None]
    """Has them call `RankPublisher.offer`; returns when they have."""
    patience_s: float
    """How long another one may store its slices without a sign that bytes of them have gone."""
    word: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    """Tells what these ranks say from what was said before they were started."""

    def offer(self, version: Version, kept: Sequence[Version]) -> None:
        """Have all of them take their slices of `version`, and let go of versions before it that are not `kept`."""
        self.order(self.word, version, kept)


class Requests:
    """Rank 0's requests to the other ranks of one policy, and their answers."""

    def __init__(self, kv: KeyValue, policy: str, others: OtherRanks) -> None:
        self._kv = kv
        self._policy = policy
        self._others = others
        self._asked: Version | None = None
        self._revision = 0
        """Of the request: answers come behind it, and what was said of an earlier request for the same version does not."""
        self._answering: set[str] = set()

    async def ask(self, version: Version, transport: str) -> None:
        """Let the other ranks store their slices of `version`, on all transports; the others of these find it asked for already."""
        if self._asked != version or transport in self._answering:
            self._revision = await self._kv.put(_wanted_key(self._policy), encode(WantedSlices(self._others.word, version)))
            self._asked, self._answering = version, set()
        self._answering.add(transport)

    async def contributions(self, transport: str) -> list[Contribution]:
        """What the other ranks have stored, on the transport of that name, of the version asked for; by rank.

        Raises:
            WeightSyncError: one of them has failed, or has given no sign for `OtherRanks.patience_s`.
        """
        return await asyncio.gather(*(self._answer(rank, transport) for rank in range(1, self._others.count + 1)))

    async def _answer(self, rank: int, transport: str) -> Contribution:
        what, patience_s = f"{self._policy} {self._asked}", self._others.patience_s
        try:
            stored = await self._heard(rank, transport)
        except TimeoutError as error:
            raise WeightSyncError(
                f"{what}: expected a sign every {patience_s:g} s that rank {rank} stores its slices on {transport}, got none",
                hint=f"see logs/trainer-{rank}.log; trainer.rank_timeout_s bounds how long ranks wait for each other",
                rank=rank,
                version=str(self._asked),
            ) from error
        if stored.error:
            said = f"{what}: rank {rank} cannot store its slices: {stored.error}"
            raise WeightSyncError(said, hint=f"see logs/trainer-{rank}.log", rank=rank)
        return stored.contributions[transport]

    async def _heard(self, rank: int, transport: str) -> StoredSlices:
        """The rank's answer; raises TimeoutError `patience_s` after its last sign, or after this call."""
        loop, patience_s = asyncio.get_running_loop(), self._others.patience_s
        key, asked = _stored_key(self._policy, rank, transport), (self._others.word, self._asked)
        async with asyncio.timeout(patience_s) as limit, aclosing(_values(self._kv, key, StoredSlices)) as values:
            while True:
                revision, stored = await anext(values)
                if (stored.word, stored.version) != asked or revision < self._revision:
                    continue
                if stored.error or stored.contributions:
                    return stored
                limit.reschedule(loop.time() + patience_s)


class MergedTransport:
    """Implements `WeightTransport` on rank 0 of several: what it publishes is its own slices and those of the other ranks.

    Args:
        name: of the transport.
        inner: this rank's end of it.
        requests: to the other ranks; one for all transports of a policy.
    """

    def __init__(self, name: str, inner: SliceTransport, requests: Requests) -> None:
        self._name = name
        self._inner = inner
        self._requests = requests

    async def publish(self, version: Version, shards: Iterator[Shard]) -> Manifest:
        await self._requests.ask(version, self._name)
        others = asyncio.create_task(self._requests.contributions(self._name))
        try:
            own = await self._inner.contribute(version, shards)
            made = [own, *await others]
        finally:
            others.cancel()
            await asyncio.gather(others, return_exceptions=True)
        return await asyncio.to_thread(self._inner.merge, made)

    def fetch(self, manifest: Manifest, wants: Sequence[Slice]) -> AsyncIterator[Part]:
        return self._inner.fetch(manifest, wants)

    async def holds(self, manifest: Manifest) -> bool:
        return await self._inner.holds(manifest)

    def source(self, manifest: Manifest) -> AbstractAsyncContextManager[FileSource | CudaSource]:
        return self._inner.source(manifest)

    async def retire(self, older_than: Version) -> None:
        await self._inner.retire(older_than)


class RankPublisher:
    """What a rank other than 0 has of a publisher: it keeps slices that rank 0 may ask for, and stores those that it does ask for.

    A task of `loop` does the storing. An error ends it: rank 0 is told, and the next `offer`, or `close`, raises it.

    Args:
        kv: of the bus.
        policy: whose weights.
        transports: by name, this rank's end of each that rank 0 publishes on.
        rank: which one it is, 1 at least.
        loop: the loop that runs the bus, in another thread than the one that calls `offer` and `close`.
    """

    def __init__(
        self,
        kv: KeyValue,
        policy: str,
        transports: Mapping[str, RankTransport],
        *,
        rank: int,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._kv = kv
        self._policy = policy
        self.transports = transports
        self._rank = rank
        self._lock = threading.Lock()
        self._word = ""
        self._kept: dict[Version, tuple[Shard, ...]] = {}
        self._done: Future[None] = asyncio.run_coroutine_threadsafe(self._work(), loop)

    def offer(self, word: str, version: Version, kept: Sequence[Version], shards: Iterable[Shard]) -> None:
        """Keep this rank's slices of `version`, and of the versions `kept`; only then `shards` are drawn, for a device has few buffers.

        Args:
            word: of rank 0.
            version: the version the shards are.
            kept: older ones that rank 0 may still ask for.
            shards: at most one slice of each tensor.

        Raises:
            WeightSyncError: slices could not be stored.
            BusError: the bus refused them.
        """
        if self._done.done():
            self._done.result()
        with self._lock:
            self._word = word
            self._kept = {one: held for one, held in self._kept.items() if one in kept}
        taken = tuple(shards)
        with self._lock:
            self._kept[version] = taken

    def close(self) -> None:
        """Stop storing; what was stored stays. Raises as `offer`."""
        if self._done.done():
            self._done.result()
        self._done.cancel()

    async def _work(self) -> None:
        async for _, wanted in _values(self._kv, _wanted_key(self._policy), WantedSlices):
            await self._store(wanted)

    async def _store(self, wanted: WantedSlices) -> None:
        # In a function of its own, which leaves no name behind: a device may have one buffer, and the next version waits for it.
        taken = self._take(wanted)
        if taken is None:
            return  # it was asked of ranks that have ended, or is stored
        for name, transport in self.transports.items():
            try:
                made = await self._contribute(wanted, name, transport, taken)
            except Exception as error:  # whatever it is: rank 0 would wait for it as for one that is late
                why = error.message if isinstance(error, StreamRLError) else f"{type(error).__name__}: {error}"
                await self._say(name, StoredSlices(wanted.word, wanted.version, error=why))
                raise
            await self._say(name, StoredSlices(wanted.word, wanted.version, contributions={name: made}))
        logger.info("event=weights_contributed policy=%s version=%s rank=%d", self._policy, wanted.version, self._rank)

    async def _contribute(self, wanted: WantedSlices, name: str, transport: RankTransport, taken: Sequence[Shard]) -> Contribution:
        """Store the slices on one transport, and let rank 0 know while they are being stored."""
        moved = asyncio.Event()
        signs = asyncio.create_task(self._signs(wanted, name, moved))
        try:
            return await transport.contribute(wanted.version, iter(taken), moved=moved.set)
        finally:
            signs.cancel()
            await asyncio.gather(signs, return_exceptions=True)

    async def _signs(self, wanted: WantedSlices, name: str, moved: asyncio.Event) -> None:
        while True:
            await moved.wait()
            moved.clear()
            await self._say(name, StoredSlices(wanted.word, wanted.version))
            await asyncio.sleep(SIGN_S)

    async def _say(self, transport: str, stored: StoredSlices) -> None:
        await self._kv.put(_stored_key(self._policy, self._rank, transport), encode(stored))

    def _take(self, wanted: WantedSlices) -> tuple[Shard, ...] | None:
        with self._lock:
            return self._kept.pop(wanted.version, None) if wanted.word == self._word else None


async def _values(kv: KeyValue, key: str, kind: type[T]) -> AsyncGenerator[tuple[int, T]]:
    """Revision and value of a key, from the present one on, for ever; what cannot be read is passed over: the next is put over it."""
    async with aclosing(cast(AsyncGenerator[KeyEntry], kv.watch_key(key))) as entries:
        async for entry in entries:
            if entry.value is None:
                continue
            try:
                value = decode(entry.value, kind, where=f"key {key}")
            except SchemaError as error:
                logger.warning("event=weights_key_unreadable key=%s action=passed_over reason=%s", key, error.message)
                continue
            yield entry.revision, value


def _wanted_key(policy: str) -> str:
    return f"{PREFIX_RANKS}wanted-{check_name('policy', policy)}"


def _stored_key(policy: str, rank: int, transport: str) -> str:
    return f"{PREFIX_RANKS}stored-{check_name('policy', policy)}-{rank}-{transport}"
