"""A trainer that is killed while its device copies: `python -m tests.weights.ipc_half_copied DIRECTORY` prints the manifest, and waits."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from streamrl.trainers.torch import snapshot_layout
from tests.weights.test_ipc import Trainer
from tests.weights.test_ipc_copying import HalfCopied


async def main(directory: Path) -> None:
    snapshot_layout.BUCKET_BYTES = 1500
    trainer = Trainer(directory)
    manifest = await trainer.publish(1)
    HalfCopied(trainer, manifest)
    sys.stdout.write(msgspec.msgpack.encode(manifest).hex() + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
