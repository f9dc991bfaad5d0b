"""Small real images, made here."""

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any


def png(shade: int, side: int = 8) -> bytes:
    """A square of one colour (PNG 1.2)."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes((shade % 256, shade // 256 % 256, 7)) * side) * side
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


GIF = b"GIF89a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff!\xf9\x04\x01\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x01D\0;"
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x01\x00\x00\x01\x00\x01\x00\x00" + bytes(60) + b"\xff\xd9"
WEBP = b"RIFF" + struct.pack("<I", 4 + 26) + b"WEBP" + b"VP8L" + struct.pack("<I", 18) + bytes(18)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


LOOK = """
import hashlib


async def look(task, engine):
    seen = [await engine.image(place) for place in range(len(task.images))]
    chat = engine.chat(task)
    turn = await chat.generate()
    episode = chat.episode()
    episode.metadata = {"seen": [hashlib.sha256(image).hexdigest() for image in seen]}
    return episode
"""
"""A producer function that says what it was given."""


def write_rows(folder: Path) -> dict[str, dict[str, Any]]:
    """Thirty rows with images in each form, ten of them with the same one, and sections of a configuration that reads them."""
    (folder / "pics").mkdir()
    (folder / "look.py").write_text(LOOK)
    rows: list[dict[str, Any]] = []
    for number in range(10):
        (folder / "pics" / f"{number}.png").write_bytes(png(number))
        parts = [{"type": "image_url", "image_url": {"url": data_url(png(100 + number))}}, {"type": "text", "text": f"{number}="}]
        rows += [
            {"prompt": f"{number}=", "images": ["pics/0.png"]},
            {"prompt": f"{number}+", "images": [f"pics/{number}.png", data_url(GIF, "image/gif")]},
            {"prompt": [{"role": "user", "content": parts}], "images": None},
        ]
    (folder / "images.jsonl").write_text("".join(json.dumps(row | {"label": "1"}) + "\n" for row in rows))
    data = {"train": str(folder / "images.jsonl"), "images_key": "images", "max_image_bytes": 8_000, "max_prompt_tokens": 24}
    return {"data": data, "model": {"max_len": 40}, "producer": {"function": f"{folder / 'look.py'}:look", "children": 1}}
