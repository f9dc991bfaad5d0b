"""The recurrence behind every return, x_t = terms_t + factors_t x_{t+1} from the last t to the first; twice, in float64.

A factor of 0 at the last token of a sequence keeps sequences apart, so a whole packed batch is one scan. Letters: `M` steps, `C` chunks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

CHUNK = 128

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
    count = -(-size // chunk)
    local, product = np.zeros(count * chunk), np.zeros(count * chunk)
    local[:size], product[:size] = terms, factors
    # One row per step within the chunk, so that each pass below runs over neighbours in memory.
    local_LC = np.ascontiguousarray(local.reshape(count, chunk).T)
    product_LC = np.ascontiguousarray(product.reshape(count, chunk).T)
    for step in range(chunk - 2, -1, -1):
        local_LC[step] += product_LC[step] * local_LC[step + 1]
        product_LC[step] *= product_LC[step + 1]
    first_C = scan(local_LC[0], product_LC[0], chunk=chunk)
    next_C = np.append(first_C[1:], 0.0)
    return (local_LC + product_LC * next_C).T.reshape(-1)[:size]
