"""Artificial time per token, so that a toy policy has the heavy tails of a real one."""

from __future__ import annotations

from statistics import NormalDist

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.core.seeds import mix64, uniform


class TokenDelay(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal time per token; every completion keeps one pace, a function of its seed, so the slow ones are slow throughout."""

    mean_s: float
    """Mean seconds of a token over all completions."""
    sigma: float = 1.0
    """Standard deviation of the logarithm; 0 makes all alike, 1.5 makes one in twenty more than 3.8 times slower than the mean."""
    seed: int = 0

    def seconds(self, seeds: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
        """Seconds per token of the completions with these seeds: [n] uint64 to [n] float64."""
        u = uniform(seeds ^ np.uint64(mix64(self.seed)), np.zeros(len(seeds), np.int64))
        # Half a step away from 0, where the inverse is infinite.
        normal = np.array([NormalDist().inv_cdf(value) for value in (u + 2.0**-54).tolist()])
        return self.mean_s * np.exp(self.sigma * normal - self.sigma**2 / 2)
