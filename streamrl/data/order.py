"""Which row comes when: a permutation of the rows for each pass, computed for any index on its own."""

from __future__ import annotations

from streamrl.core.seeds import mix64

_ROUNDS = 8


def row_of(seed: int, index: int, num_rows: int, *, shuffle: bool = True) -> tuple[int, int]:
    """(epoch, row) of the index-th item of an endless sequence of passes over `num_rows` rows.

    Within one epoch every row comes exactly once, in an order that depends on (seed, epoch). Nothing is stored and nothing needs to
    have been drawn before: constant time and memory for any index. Raises ValueError for num_rows < 1 or a negative index.
    """
    if num_rows < 1 or index < 0:
        raise ValueError(f"expected num_rows >= 1 and index >= 0, got num_rows={num_rows}, index={index}")
    epoch, place = divmod(index, num_rows)
    return epoch, permuted(mix64(mix64(seed) + epoch), place, num_rows) if shuffle else place


def permuted(key: int, place: int, size: int) -> int:
    """Image of `place` under the permutation of 0 .. size - 1 that `key` names.

    A balanced Feistel network over the next even power of two, walked along its cycle until it is back inside the domain (Black and
    Rogaway, CT-RSA 2002): a bijection whatever the round function. Fewer than four walks on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    value = place
    while True:
        left, right = value >> half_bits, value & mask
        for step in range(_ROUNDS):
            left, right = right, left ^ (mix64(key ^ mix64(right << 8 | step)) & mask)
        value = left << half_bits | right
        if value < size:
            return value
