"""How far trainer and sampler are apart under the same weights: samples scored again with the very version that sampled them.

The version that is trained from has moved on since a sample was drawn, so the plain distance of the two log-probabilities mixes the
policy's drift with what two implementations of one model and their rounding leave. Here the latter stands alone, at every version.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from streamrl.core.batches import TrainBatch
from streamrl.core.packing import Indices
from streamrl.core.reductions import sample_of_token
from streamrl.trainers.objective import DISTANCE, DISTANCE_MAX

Score = Callable[[TrainBatch, npt.NDArray[np.bool_], Indices], npt.NDArray[np.float32]]
"""(batch, wanted [T], samples) to log-probs [T] under the parameters as they are now."""


class Recheck:
    """Keeps copies of the newest versions and puts them in place of the parameters for a moment. The parameters' bits stay as they are.

    Args:
        parameters: of the model.
        samples: of each batch that are scored again; 0: nothing is kept and nothing done.
        versions: how many are kept, that being trained from included: one more than the oldest age to be scored.
    """

    def __init__(self, parameters: Sequence[tuple[str, torch.nn.Parameter]], *, samples: int, versions: int) -> None:
        self._parameters = [parameter for _, parameter in parameters]
        self._samples = samples
        self._versions = versions
        self._kept: dict[int, list[Tensor]] = {}

    def keep(self, number: int) -> None:
        """Copy the parameters, which are those of version `number`, and forget what is too old, or newer and from before a restart."""
        if self._samples == 0:
            return
        self._kept = {n: copies for n, copies in self._kept.items() if number - self._versions < n < number}
        self._kept[number] = [parameter.detach().clone() for parameter in self._parameters]

    def measure(self, batch: TrainBatch, score: Score) -> dict[str, float]:
        """Mean and greatest distance over the trained tokens of the chosen samples; nothing where no sample can be scored."""
        number = batch.version.number
        ages_N = single_age(batch)
        known = [age for age in np.unique(ages_N) if number - int(age) in self._kept]
        eligible = np.flatnonzero(np.isin(ages_N, known))
        if self._samples == 0 or len(eligible) == 0:
            return {}
        chosen = eligible[np.unique(np.linspace(0, len(eligible) - 1, self._samples).astype(np.int64))]
        distances: list[npt.NDArray[np.float32]] = []
        for age in np.unique(ages_N[chosen]):
            samples = chosen[ages_N[chosen] == age]
            wanted = batch.loss_mask & np.isfinite(batch.sampler_logprobs) & np.isin(sample_of_token(batch), samples)
            with self._in_place(number - int(age)):
                found = score(batch, wanted, samples)
            distances.append(np.abs(found - batch.sampler_logprobs)[wanted])
        every = np.concatenate(distances)
        if not every.size:
            return {}
        return {DISTANCE: float(every.mean()), DISTANCE_MAX: float(every.max())}

    @contextmanager
    def _in_place(self, number: int) -> Generator[None]:
        current = [parameter.data for parameter in self._parameters]
        try:
            for parameter, kept in zip(self._parameters, self._kept[number], strict=True):
                parameter.data = kept
            yield
        finally:
            for parameter, data in zip(self._parameters, current, strict=True):
                parameter.data = data


def single_age(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """[N] the age of samples that one version sampled from the first token to the last; -1 for others and those that train nothing."""
    begins = batch.offsets[:-1]
    staleness_T = batch.staleness.astype(np.int64)
    oldest = np.maximum.reduceat(staleness_T, begins)
    youngest = np.minimum.reduceat(np.where(batch.loss_mask, staleness_T, np.iinfo(np.int64).max), begins)
    return np.where(oldest == youngest, oldest, -1)
