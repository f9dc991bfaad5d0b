"""The recurrence behind every return, x_t = terms_t + factors_t x_{t+1} from the last t to the first; twice, in float64.

A factor of 0 at the last token of a sequence keeps sequences apart, so a whole packed batch is one scan. Letters: `M` steps, `C` chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHUNK = 128
_SQUARE = 64

Floats = npt.NDArray[np.float64]


def scan_serial(terms: Floats, factors: Floats) -> Floats:
    """[M] x, one step after the other: the definition.

    Args:
        terms: [M]
        factors: [M]; the last one is multiplied by x_M = 0.
    """
    found = np.empty(len(terms))
    x = 0.0
    for t in range(len(terms) - 1, -1, -1):
        x = float(terms[t]) + float(factors[t]) * x
        found[t] = x
    return found


def scan(terms: Floats, factors: Floats, *, chunk: int = CHUNK) -> Floats:
    """[M] x, equal to `scan_serial` but for rounding: all chunks go in step, then the same scan runs over the chunks.

    Within a chunk, x_t = local_t + product_t x_next, where local_t is what x_t would be if nothing came after the chunk, product_t the
    product of its factors from t on and x_next the first x of the chunk behind it. Nothing is divided, so factors of 0 are exact.

    Args:
        terms: [M]
        factors: [M]; the last one is multiplied by x_M = 0.
        chunk: steps in a chunk, at least 2; the result does not depend on it but for rounding.
    """
    size = len(terms)
    if size <= chunk:
        return scan_serial(terms, factors)
    # One row per step within the chunk, so that each pass below runs over neighbours in memory.
    local_LC, product_LC = _rows_of_steps(terms, chunk), _rows_of_steps(factors, chunk)
    for step in range(chunk - 2, -1, -1):
        local_LC[step] += product_LC[step] * local_LC[step + 1]
        product_LC[step] *= product_LC[step + 1]
    first_C = scan(local_LC[0], product_LC[0], chunk=chunk)
    product_LC *= np.append(first_C[1:], 0.0)
    local_LC += product_LC
    return _transpose(local_LC).reshape(-1)[:size]


def _rows_of_steps(values: Floats, chunk: int) -> Floats:
    """[chunk, C] the values [M], a column per chunk; 0 behind the last."""
    padded = np.zeros(-(-len(values) // chunk) * chunk)
    padded[: len(values)] = values
    return _transpose(padded.reshape(-1, chunk))


def _transpose(values: Floats) -> Floats:
    """A copy of the transposed matrix, in C order; in squares, for whole columns a power of two apart drive each other out of the cache."""
    rows, columns = values.shape
    found = np.empty((columns, rows))
    for row in range(0, rows, _SQUARE):
        for column in range(0, columns, _SQUARE):
            found[column : column + _SQUARE, row : row + _SQUARE] = values[row : row + _SQUARE, column : column + _SQUARE].T
    return found
