"""Structs with numpy arrays as MessagePack: how a trainer's ranks hand each other their batches.

An array is (dtype, shape, bytes in C order). Only plain numbers and booleans pass; nothing is unpickled.
"""

from __future__ import annotations

from typing import Any, cast, get_origin

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError

_KINDS = "biuf"


class _Array(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def pack(value: msgspec.Struct) -> bytes:
    """Bytes of a struct whose fields may be arrays; raises SchemaError for arrays of objects."""
    return msgspec.msgpack.encode(value, enc_hook=_encode)


def unpack(body: bytes, kind: Any) -> Any:
    """What `pack` was given; arrays are copies that may be written. Raises SchemaError for anything that is no `kind`."""
    try:
        return msgspec.msgpack.decode(body, type=kind, dec_hook=_decode)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise SchemaError(
            f"expected the bytes of {kind}, got something else: {error}", hint="do all ranks run the same streamrl?"
        ) from error


def _encode(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"cannot pack {type(value).__name__}")
    array = cast("npt.NDArray[Any]", value)
    if array.dtype.kind not in _KINDS:
        raise SchemaError(f"expected an array of numbers or booleans, got one of {array.dtype}", dtype=str(array.dtype))
    return _Array(array.dtype.str, array.shape, array.tobytes())


def _decode(kind: Any, value: Any) -> Any:
    if (get_origin(kind) or kind) is not np.ndarray:
        raise NotImplementedError(f"cannot unpack {kind}")
    packed = msgspec.convert(value, _Array)
    dtype = _dtype(packed.dtype)
    if dtype.itemsize * int(np.prod(packed.shape, dtype=np.int64)) != len(packed.data):
        raise ValueError(f"expected bytes for {packed.shape} of {dtype}, got {len(packed.data)}")
    return np.frombuffer(packed.data, dtype).reshape(packed.shape).copy()


def _dtype(text: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(text)
    except TypeError as error:
        raise ValueError(f"expected a dtype, got {text!r}") from error
    if dtype.kind not in _KINDS:
        raise ValueError(f"expected an array of numbers or booleans, got one of {dtype}")
    return dtype
