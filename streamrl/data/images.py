"""Images of a row: from its field, or from the parts of its messages. They are read and never decoded.

```text
row[images_key]                      a path, bytes, a data URL, {bytes, path} as `datasets` has it, or a list of these
{"type": "image"}                    a part of a message: the next one of that field
{"type": "image", "image": ...}      its own, of the same forms; also {"type": "image_url", "image_url": {"url": "data:..."}}
```

A message's parts become one text, in which `<image>` stands for each image: that is what the policy reads of it.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from streamrl.errors import DataError, SchemaError
from streamrl.schemas.images import MOST_IMAGES, Image, image_of

MARK = "<image>"
"""What stands in a message's text for an image."""
_DATA_URL = re.compile(r"data:([^;,]*)(?:;[^;,]*)*;base64,", re.IGNORECASE)
_PARTS = ("text", "image", "image_url")


class RowImage(msgspec.Struct, frozen=True):
    """One image of a row."""

    image: Image
    data: bytes


class ImageReader:
    """Reads the images of rows.

    Args:
        folder: what paths are relative to, and may not leave, by no link either.
        max_bytes: of all images of a row.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes

    def read(self, given: Any, prompt: Any) -> tuple[Any, tuple[RowImage, ...]]:
        """The prompt with texts in place of its messages' parts, and the row's images in order.

        Args:
            given: the value of the row's field; None: there is none.
            prompt: a text, or chat messages.

        Raises:
            DataError: an image that is not there, outside the folder, none of the types, not whole, not what its data URL says; too many,
                or too large together; parts that name another number than the field has, or that hold neither text nor image.
        """
        listed = [*given] if isinstance(given, list | tuple) else [] if given is None else [given]
        left, found = list(listed), list[Any]()
        if isinstance(prompt, str):
            found = left
        else:
            prompt = [self._flat(message, left, found) for message in prompt]
            bare = len(listed) - len(left)
            if left and (bare or found):
                raise DataError(f"expected as many image parts in the messages as the field has images, {len(listed)}, got {bare}")
            found = found or left
        if len(found) > MOST_IMAGES:
            raise DataError(f"expected at most {MOST_IMAGES} images, got {len(found)}")
        return prompt, tuple(self._all(found))

    def _flat(self, message: Mapping[str, Any], left: list[Any], found: list[Any]) -> Mapping[str, Any]:
        """A message with a text as its content; its images go to `found`, those of the field are taken from `left`."""
        content = message.get("content")
        if not isinstance(content, list):
            return message
        texts: list[str] = []
        for part in cast("list[Any]", content):
            if isinstance(part, dict) and (kind := part.get("type")) in _PARTS and (kind != "text" or isinstance(part.get("text"), str)):
                if kind == "text":
                    texts.append(part["text"])
                    continue
                given = part.get(kind)
                if kind == "image_url":
                    given = given.get("url") if isinstance(given, dict) else given
                elif given is None and not left:
                    raise DataError("expected an image for each part of type image, got more parts than the field has images")
                found.append(left.pop(0) if given is None and kind == "image" else given)
                texts.append(MARK)
                continue
            shown = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"expected parts of a message of the types {', '.join(_PARTS)}, got {str(shown)[:80]!r}")
        return {**message, "content": "".join(texts)}

    def _all(self, given: Sequence[Any]) -> Iterator[RowImage]:
        room = self._max_bytes
        for number, one in enumerate(given):
            try:
                data = self._bytes(one, room)
                yield RowImage(image_of(data), data)
            except (DataError, SchemaError) as error:
                raise DataError(f"image {number}: {error.message}", hint=error.hint) from error
            room -= len(data)

    def _bytes(self, given: Any, room: int) -> bytes:
        if isinstance(given, dict):  # of `datasets`; a path beside bytes is a name that they had elsewhere
            given = given.get("bytes") if given.get("bytes") is not None else given.get("path")
        if isinstance(given, bytes):
            if len(given) > room:
                raise self._too_large(len(given), room)
            return given
        if not isinstance(given, str) or not given:
            raise DataError(f"expected a path, bytes or a data URL, got {type(given).__name__ if given != '' else 'an empty text'}")
        if given[:5].lower() == "data:":
            return self._of_url(given, room)
        if re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+://", given):
            raise DataError(
                f"expected a path, bytes or a data URL, got the address {given[:80]!r}", hint="fetch it first: rows are not downloaded"
            )
        return self._of_file(given, room)

    def _of_url(self, url: str, room: int) -> bytes:
        if (head := _DATA_URL.match(url[:200])) is None:
            raise DataError(f"expected a data URL in base64, got {url[:60]!r}")
        text = url[head.end() :]
        if len(text) // 4 * 3 - 2 > room:
            raise self._too_large(len(text) // 4 * 3, room)
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise DataError(f"expected a data URL in base64, got another one: {error}") from error
        said = {"image/jpg": "image/jpeg"}.get(head[1].lower(), head[1].lower())
        if said != (got := image_of(data).media_type):
            raise DataError(f"expected {said or 'a type'}, as its data URL says, got {got}", hint="correct the URL's type")
        return data

    def _of_file(self, name: str, room: int) -> bytes:
        try:
            folder, path = self._folder.resolve(strict=True), (self._folder / name).resolve(strict=True)
            if not path.is_relative_to(folder):
                raise DataError(f"expected a file in {folder}, got {name[:200]!r}, which lies outside", hint="set data.images_folder")
            # By descriptor, and without waiting: what is no file any more is not read.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise DataError(f"expected a file, got {name[:200]!r}, which is none")
                if status.st_size > room:
                    raise self._too_large(status.st_size, room)
                with open(descriptor, "rb", closefd=False) as file:
                    return file.read(status.st_size)
            finally:
                os.close(descriptor)
        except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name with a zero byte
            said = error.strerror if isinstance(error, OSError) else error
            raise DataError(
                f"expected an image file {name[:200]!r} in {self._folder}, got none: {said}", hint="data.images_folder is where paths begin"
            ) from error

    def _too_large(self, size: int, room: int) -> DataError:
        said = f"expected at most {self._max_bytes} bytes for all images of a row, got one of {size} where {room} are left"
        return DataError(said, hint="raise data.max_image_bytes, or make it smaller")


def has_image_parts(prompt: Any) -> bool:
    """Whether a message of these has a part that is an image."""
    if not isinstance(prompt, list | tuple):
        return False
    contents = (message.get("content") for message in cast("Sequence[Any]", prompt) if isinstance(message, Mapping))
    parts = (part for content in contents if isinstance(content, list | tuple) for part in cast("Sequence[Any]", content))
    return any(isinstance(part, Mapping) and part.get("type") in ("image", "image_url") for part in parts)
