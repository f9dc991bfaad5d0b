"""Counter-based randomness: every random number is a function of what it is for, never of what was drawn before.

Mixing is splitmix64's finaliser (Steele, Lea and Flood, OOPSLA 2014), which passes BigCrush on sequential counters.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MUL_1 = 0xBF58476D1CE4E5B9
_MUL_2 = 0x94D049BB133111EB


def mix64(value: int) -> int:
    """Scramble one 64-bit integer; a bijection."""
    z = (value + _GAMMA) & _MASK
    z = ((z ^ (z >> 30)) * _MUL_1) & _MASK
    z = ((z ^ (z >> 27)) * _MUL_2) & _MASK
    return z ^ (z >> 31)


def mix64_array(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`mix64` of every element ([n] uint64 to [n] uint64)."""
    z = values + np.uint64(_GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MUL_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MUL_2)
    return z ^ (z >> np.uint64(31))


def run_seed(run: str, seed: int) -> int:
    """Seed of a run from its id and `run.seed`; 63 bits."""
    text = hashlib.sha256(f"{run}/{seed}".encode()).digest()
    return int.from_bytes(text[:8], "little") >> 1


def task_seed(base: int, task: int) -> int:
    """Seed of a task; 63 bits, so that it fits a signed integer anywhere."""
    return mix64((mix64(base) ^ task) & _MASK) >> 1


def rollout_seed(task: int, rollout: int) -> int:
    """Seed of one rollout from its task's seed; 63 bits."""
    return mix64((mix64(task) + rollout + 1) & _MASK) >> 1


def uniform(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, position): [n] uint64, [n] int64 to [n] float64 with 53 random bits."""
    mixed = mix64_array(mix64_array(seeds) ^ positions.astype(np.uint64))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
