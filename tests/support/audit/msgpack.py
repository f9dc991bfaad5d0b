"""Enough of MessagePack to read what is on the bus: https://github.com/msgpack/msgpack/blob/master/spec.md, extensions left out."""

import struct
from typing import Any

FIXED = {0xC0: None, 0xC2: False, 0xC3: True}
NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
SIZES = {0xC4: ">B", 0xC5: ">H", 0xC6: ">I", 0xD9: ">B", 0xDA: ">H", 0xDB: ">I", 0xDC: ">H", 0xDD: ">I", 0xDE: ">H", 0xDF: ">I"}


def unpack(data: bytes) -> Any:
    """One value; raises ValueError when the bytes are not exactly one."""
    try:
        value, end = _value(data, 0)
    except (struct.error, IndexError, UnicodeDecodeError, TypeError, RecursionError) as error:
        raise ValueError(f"no MessagePack: {error}") from error
    if end != len(data):
        raise ValueError(f"expected one MessagePack value, got {len(data) - end} bytes more")
    return value


def _value(data: bytes, at: int) -> tuple[Any, int]:
    code, at = data[at], at + 1
    if code <= 0x7F:
        return code, at
    if code >= 0xE0:
        return code - 256, at
    if code in FIXED:
        return FIXED[code], at
    if code in NUMBERS:
        form = NUMBERS[code]
        return struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if 0x80 <= code <= 0x8F:
        return _map(data, at, code & 0x0F)
    if 0x90 <= code <= 0x9F:
        return _array(data, at, code & 0x0F)
    if 0xA0 <= code <= 0xBF:
        return _text(data, at, code & 0x1F)
    if code not in SIZES:
        raise ValueError(f"expected a MessagePack type, got byte 0x{code:02x}")
    form = SIZES[code]
    size, at = struct.unpack_from(form, data, at)[0], at + struct.calcsize(form)
    if code <= 0xC6:
        return _bytes(data, at, size), at + size
    if code <= 0xDB:
        return _text(data, at, size)
    return _array(data, at, size) if code <= 0xDD else _map(data, at, size)


def _bytes(data: bytes, at: int, size: int) -> bytes:
    if at + size > len(data):
        raise ValueError(f"expected {size} bytes at {at}, got {len(data) - at}")
    return data[at : at + size]


def _text(data: bytes, at: int, size: int) -> tuple[str, int]:
    return _bytes(data, at, size).decode(), at + size


def _array(data: bytes, at: int, size: int) -> tuple[list[Any], int]:
    items = []
    for _ in range(size):
        item, at = _value(data, at)
        items.append(item)
    return items, at


def _map(data: bytes, at: int, size: int) -> tuple[dict[Any, Any], int]:
    items = {}
    for _ in range(size):
        key, at = _value(data, at)
        items[key], at = _value(data, at)
    return items, at
