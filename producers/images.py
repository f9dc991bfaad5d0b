"""The images of one task, as user code asks for them: fetched once, when it first does."""

from __future__ import annotations

import asyncio
import hashlib

from streamrl.bus.protocol import BlobReader
from streamrl.errors import BusError, EngineUnavailable, NotFound, SchemaError
from streamrl.schemas.blobs import BlobRef
from streamrl.schemas.codec import decode
from streamrl.schemas.images import StoredImages
from streamrl.schemas.tasks import RolloutTask


class TaskImages:
    """Reads and checks the blob that a task names; its rollouts share what was read.

    Args:
        blobs: where it is.
        task: with images.
    """

    def __init__(self, blobs: BlobReader, task: RolloutTask) -> None:
        self._blobs = blobs
        self._task = task
        self._lock = asyncio.Lock()
        self._read: tuple[bytes, ...] = ()

    async def __call__(self, place: int) -> bytes:
        """The image at a place.

        Raises:
            NotFound: it is gone, or is not what the task says.
            EngineUnavailable: the bus is away.
            SchemaError: the task has none there.
        """
        if not 0 <= place < len(self._task.images):
            raise SchemaError(f"expected the place of one of {len(self._task.images)} images, from 0 on, got {place}")
        async with self._lock:
            self._read = self._read or await self._fetch()
        return self._read[place]

    async def _fetch(self) -> tuple[bytes, ...]:
        ref, index = self._task.image_blob, self._task.index
        assert isinstance(ref, BlobRef)
        try:
            body = await self._blobs.get(ref.name)
        except NotFound:
            raise
        except BusError as error:
            raise EngineUnavailable(f"the images of task {index} cannot be read now: {error.message}", hint=error.hint) from error
        images, found = await asyncio.to_thread(_opened, body, ref.name)
        if found != [image.sha256 for image in self._task.images]:
            raise NotFound(f"expected the images of task {index} in blob {ref.name}, got others", name=ref.name)
        return images


def _opened(body: bytes, name: str) -> tuple[tuple[bytes, ...], list[str]]:
    """The images of a blob and their SHA-256: of many megabytes, which is no work for an event loop."""
    images = decode(body, StoredImages, where=f"blob {name}").images
    return images, [hashlib.sha256(image).hexdigest() for image in images]
