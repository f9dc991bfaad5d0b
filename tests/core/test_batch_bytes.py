from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from streamrl.core.batch_bytes import pack, unpack
from streamrl.errors import SchemaError
from tests.support.errors import raises


class Pair(msgspec.Struct, frozen=True, tag=True):
    name: str
    first: npt.NDArray[np.float32]
    second: npt.NDArray[Any] | None = None


class Other(msgspec.Struct, frozen=True, tag=True):
    number: int


@pytest.mark.parametrize(
    "array",
    [
        np.array([1.5, np.nan, -0.0], np.float32),
        np.zeros((0, 3), np.int64),
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.array([True, False]),
    ],
)
def test_arrays_come_back_bit_by_bit_and_may_be_written(array: npt.NDArray[Any]) -> None:
    back = unpack(pack(Pair("x", np.ones(2, np.float32), array)), Pair | Other)
    assert (back.name, back.second.dtype, back.second.shape) == ("x", array.dtype, array.shape)
    assert back.second.tobytes() == array.tobytes()
    back.second[...] = 0


def test_nothing_that_could_run_code_passes() -> None:
    with raises(SchemaError, dtype="object"):
        pack(Pair("x", np.array([print], object)))
    forged = msgspec.msgpack.encode({"type": "Pair", "name": "x", "first": ["|O", [1], b"12345678"]})
    with pytest.raises(SchemaError, match="numbers or booleans"):
        unpack(forged, Pair | Other)
    short = msgspec.msgpack.encode({"type": "Pair", "name": "x", "first": ["<f4", [3], b"1234"]})
    with pytest.raises(SchemaError, match=r"\(3,\) of float32, got 4"):
        unpack(short, Pair | Other)
