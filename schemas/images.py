"""Images of rows: byte strings that nobody here decodes, and the blobs that they lie in.

All images of a row are one blob. Its name is that of a window of consecutive tasks and the SHA-256 of its bytes, so rows with the same
images have one blob in a window, and who issues a task again stores nothing twice. No task behind the window names it: once all tasks of
the window have ended and their messages are gone, so may the blob be.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import msgspec

from streamrl.errors import SchemaError
from streamrl.schemas.blobs import BlobRef

MEDIA_TYPES = ("image/png", "image/jpeg", "image/gif", "image/webp")
MOST_IMAGES = 64
"""Of one row."""
_NAME = re.compile(r"([0-9]{1,18})-([0-9]{1,18})/([0-9a-f]{64})")
_TAIL_BYTES = 1 << 16
"""Of a file, in which the end mark of its format has to stand: some writers put something behind it."""


class Image(msgspec.Struct, frozen=True):
    """What is known of an image without its bytes."""

    sha256: str
    """Hex."""
    media_type: str
    """One of MEDIA_TYPES, by how its bytes begin."""
    num_bytes: int


class StoredImages(msgspec.Struct, frozen=True):
    """The blob: the bytes of a row's images, in order."""

    images: tuple[bytes, ...]


def media_type_of(data: bytes) -> str:
    """One of MEDIA_TYPES by the first bytes; empty: none of them."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def is_cut(data: bytes, media_type: str) -> bool:
    """Whether a file ends before the end mark of its format, or before the length that it gives. Nothing else of it is looked at."""
    if media_type == "image/webp":
        return len(data) < 8 + int.from_bytes(data[4:8], "little")
    if media_type == "image/gif":
        return not data.rstrip(b"\0").endswith(b";")
    mark = b"IEND\xaeB`\x82" if media_type == "image/png" else b"\xff\xd9"
    return mark not in data[-_TAIL_BYTES:]


def image_of(data: bytes) -> Image:
    """What is known of these bytes; raises SchemaError where they are no whole image of one of MEDIA_TYPES."""
    if not (media_type := media_type_of(data)):
        begins = f"begin with {data[:8].hex()}" if data else "are none"
        raise SchemaError(f"expected an image ({', '.join(MEDIA_TYPES)}), got {len(data)} bytes that {begins}")
    if is_cut(data, media_type):
        raise SchemaError(f"expected a whole {media_type}, got {len(data)} bytes without its end")
    return Image(hashlib.sha256(data).hexdigest(), media_type, len(data))


def window_of(task: int, size: int) -> tuple[int, int]:
    """First and last task of the window of `size` tasks that a task lies in."""
    return task // size * size, task // size * size + size - 1


def image_blob(images: Sequence[bytes], window: tuple[int, int]) -> tuple[BlobRef, bytes]:
    """How a task of this window names the images of its row, and what is to be stored under that name."""
    body = msgspec.msgpack.encode(StoredImages(tuple(images)))
    digest = hashlib.sha256(body).hexdigest()
    return BlobRef(f"{window[0]}-{window[1]}/{digest}", digest, 0, len(images)), body


def window_named(name: str) -> tuple[int, int] | None:
    """First and last task of the window in a blob's name; None: it is no name of images."""
    found = _NAME.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None
