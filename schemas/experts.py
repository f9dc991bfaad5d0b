"""Routed experts of a mixture-of-experts model: which experts each token went to, in the smallest integers that hold them."""

from __future__ import annotations

import base64
import math

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError

DTYPES = ("uint8", "uint16")


class RoutedExperts(msgspec.Struct, frozen=True):
    """Expert ids [tokens, layers, experts per token] in C order; `tokens` are all of the sequence but the last, prompt included."""

    dtype: str
    """`uint8` for up to 256 experts, else `uint16`."""
    shape: tuple[int, int, int]
    data: bytes

    def array(self) -> npt.NDArray[np.unsignedinteger]:
        """The ids as an array of `dtype`; raises SchemaError when the bytes do not fit dtype and shape."""
        fits = self.dtype in DTYPES and min(self.shape) >= 0
        if not fits or len(self.data) != np.dtype(self.dtype).itemsize * math.prod(self.shape):
            raise SchemaError(
                f"expected routed experts of {DTYPES} and shape {self.shape}, got {len(self.data)} bytes of {self.dtype!r}",
                shape=self.shape,
                size_bytes=len(self.data),
            )
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)

    def first(self, tokens: int) -> RoutedExperts:
        """Of the first tokens alone."""
        each = len(self.data) // self.shape[0] if self.shape[0] else 0
        return RoutedExperts(self.dtype, (tokens, *self.shape[1:]), self.data[: tokens * each])

    def text(self) -> str:
        """The bytes in base64."""
        return base64.b64encode(self.data).decode()


def compact(ids: npt.NDArray[np.integer], experts: int) -> RoutedExperts:
    """Ids [tokens, layers, experts per token] below `experts`."""
    dtype = "uint8" if experts <= 256 else "uint16"
    shape = ids.shape[0], ids.shape[1], ids.shape[2]
    return RoutedExperts(dtype, shape, ids.astype(dtype).tobytes())
