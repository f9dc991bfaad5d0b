"""Drops of a ledger entry that are too many for a message: they go into a blob, and the entry names it.

A stream of messages that cannot be used, or of repeats, may give any number of drops before a batch closes; the bus takes messages of a few
megabytes. Nothing of the blobs is ever removed: like the ledger they are there for as long as the run's streams are.
"""

from __future__ import annotations

import asyncio
import hashlib
import zlib

import msgspec
from msgspec.structs import replace

from streamrl.bus.protocol import BlobReader, Blobs
from streamrl.errors import SchemaError, StreamFull
from streamrl.schemas.codec import decode, encode
from streamrl.schemas.ledger import Drop, LedgerEntry, SpilledDrops, count_drops

PREFIX_BLOBS = "ledger/"
INLINE_BYTES = 1 << 20
"""An entry that would be larger with its drops in it spills them."""


async def spill(blobs: Blobs, entry: LedgerEntry) -> LedgerEntry:
    """The entry to be stored: itself, or with its drops in a blob, which is stored when this returns.

    The name has version and fence in it, so that a trainer that goes on after another finds the name free.

    Raises:
        StreamFull: there is no room for the blob.
    """
    if not entry.drops or len(encode(entry)) <= INLINE_BYTES:
        return entry
    body = await asyncio.to_thread(lambda: zlib.compress(encode(entry.drops), 1))
    name = f"{PREFIX_BLOBS}{entry.trainer}/{entry.version.epoch}-{entry.version.number}/{entry.fence}"
    try:
        digest = await blobs.put(name, body)
    except StreamFull as error:
        raise StreamFull(
            f"cannot store the {len(entry.drops)} drops of version {entry.version} ({len(body)} bytes): {error.message}",
            hint="raise bus.blobs_bytes, or lower weights.keep; nothing is lost, the run goes on from its checkpoint",
        ) from error
    spilled = SpilledDrops(blob=name, sha256=digest, number=len(entry.drops), reasons=dict(count_drops(entry.drops)))
    return replace(entry, drops=(), spilled=spilled)


async def whole(blobs: BlobReader, entry: LedgerEntry) -> LedgerEntry:
    """The entry with all its drops in it, as it was before `spill`; unchanged when they are.

    Raises:
        NotFound: the blob is gone.
        SchemaError: it is not what the entry says.
    """
    spilled = entry.spilled
    if isinstance(spilled, msgspec.UnsetType):
        return entry
    body = await blobs.get(spilled.blob)
    drops = await asyncio.to_thread(_unpack, body, spilled)
    return replace(entry, drops=drops, spilled=msgspec.UNSET)


def _unpack(body: bytes, spilled: SpilledDrops) -> tuple[Drop, ...]:
    digest = hashlib.sha256(body).hexdigest()
    if digest != spilled.sha256:
        raise SchemaError(
            f"expected drops with sha256 {spilled.sha256[:16]} in blob {spilled.blob}, got {digest[:16]}",
            hint="was the blob, or the recording, changed by hand?",
        )
    try:
        data = zlib.decompress(body)
    except zlib.error as error:
        raise SchemaError(f"expected compressed drops in blob {spilled.blob}, got {len(body)} bytes: {error}") from error
    return decode(data, tuple[Drop, ...], where=f"blob {spilled.blob}")
