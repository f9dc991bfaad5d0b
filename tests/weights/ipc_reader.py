"""An engine's process: takes a version's lease, says so, and then reads it, hangs, or dies, as it is told.

`python -m tests.weights.ipc_reader DIRECTORY < manifest`: prints `leased`, waits for a line (`read` or `release`), prints the digest.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Manifest
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.weights.ipc import IpcTransport
from streamrl.weights.manifest import ITEM_BYTES
from streamrl.weights.protocol import CudaSource
from streamrl.weights.shm import ShmTransport
from tests.support.wanted import fetched
from tests.weights.host_memory import MappedOpener


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(directory: Path, manifest: Manifest) -> None:
    shm = ShmTransport(run="r", policy="policy", directory=directory)
    transport = IpcTransport(run="r", policy="policy", directory=directory, fallback=shm, opener=MappedOpener)
    try:
        async with transport.source(manifest) as source:
            assert isinstance(source, CudaSource)
            say("leased")
            await asyncio.to_thread(sys.stdin.readline)
        content = await fetched(transport, manifest)
        say(combine({t.name: tensor_digest(content[t.offset : t.offset + t.nbytes], ITEM_BYTES[t.dtype]) for t in manifest.tensors}))
    except WeightSyncError as error:
        say(f"error {error.message}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline()), type=Manifest)))
