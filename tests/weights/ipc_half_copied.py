"""A trainer that is killed while its device copies: `python -m tests.weights.ipc_half_copied DIRECTORY` prints the manifest, and stays."""

from __future__ import annotations

import asyncio
import signal
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
    signal.pause()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
