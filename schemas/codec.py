"""MessagePack for everything but samples (those are Arrow: `streamrl.schemas.columns`).

Named fields on the wire: unknown ones are ignored, missing ones take their defaults, so old and new code can read each other
within one major schema version. The golden bytes in `tests/golden` pin it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from streamrl.errors import SchemaError
from streamrl.schemas.tasks import RolloutTask, on_the_wire

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(record: Any) -> bytes:
    """One struct to MessagePack with named fields."""
    return _encoder.encode(on_the_wire(record) if isinstance(record, RolloutTask) else record)


def decode(data: bytes | memoryview, kind: type[T], *, where: str = "") -> T:
    """MessagePack to one struct of type `kind`; raises SchemaError that names `where` the bytes came from."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:  # text that is no UTF-8, or nested without end
        name = getattr(kind, "__name__", str(kind))
        place = f" at {where}" if where else ""
        raise SchemaError(
            f"expected a {name} in MessagePack{place}, got {len(data)} bytes that are none: {error}",
            hint="was it written by another version of streamrl, or by something else?",
            expected=name,
            where=where,
        ) from error
