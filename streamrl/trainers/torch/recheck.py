"""How far trainer and sampler are apart under the same weights: samples scored again with the very version that sampled them.

The version that is trained from has moved on since a sample was drawn, so the plain distance of the two log-probabilities mixes the
policy's drift with what two implementations of one model and their rounding leave. Here the latter stands alone, at every version.

Whether that is rounding can be seen from the rollout where they are furthest apart, scored once more in float32: rounding takes sampler
and trainer about equally far from there. Where the sampler alone is far off, it did not sample from these weights and this text.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from streamrl.algorithms.objective import distances
from streamrl.core.batches import TrainBatch, sample_of_token
from streamrl.core.packing import Indices
from streamrl.trainers.activations import GIB

SAMPLER_ERROR = "train/float32_sampler_abs_diff_max"
TRAINER_ERROR = "train/float32_trainer_abs_diff_max"
"""Greatest distance of either's log-probs from those in float32, in the rollout where the two are furthest apart."""
GLANCE = 8
"""Rollouts that are scored again where nobody asked for any."""
FORWARD_BYTES = 2 << 30
"""What a forward pass over one rollout takes besides, about."""

Score = Callable[[TrainBatch, npt.NDArray[np.bool_], Indices], npt.NDArray[np.float32]]
"""(batch, wanted [T], samples) to log-probs [T] under the parameters as they are now."""


class Recheck:
    """Keeps copies of the newest versions and puts them in place of the parameters for a moment. The parameters' bits stay as they are.

    Args:
        parameters: of the model.
        samples: of each batch that are scored again; 0: see `every`.
        versions: how many are kept, that being trained from included: one more than the oldest age to be scored.
        every: with `samples` 0, one version in so many is kept in the host's memory, until a batch has samples of it, of which `GLANCE` are
            scored again: else nothing would be known in a run in which samples are always older than the newest weights. 0: none is.
        widen: the model also runs in float32; one rollout of each batch is scored so, which takes a float32 copy for a moment. One that is
            cut into parts, which are float32, runs in one type alone.
        written: called when what is in the parameters' place has changed.
        free_bytes: of the device's memory, the same on all ranks; where they are too few for the float32 copy, that rollout is left out:
            a run does not end for a measurement. None: memory is not looked at.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        samples: int,
        versions: int,
        every: int = 0,
        widen: bool = True,
        written: Callable[[], None] = lambda: None,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        self._parameters = [parameter for _, parameter in parameters]
        self._samples = samples
        self._versions = versions
        self._every = every
        self._bytes = sum(parameter.numel() * parameter.itemsize for parameter in self._parameters) + FORWARD_BYTES
        self._widen = widen and any(parameter.dtype in (torch.bfloat16, torch.float16) for parameter in self._parameters)
        self._written = written
        self._free_bytes = free_bytes
        self._float32_bytes = 4 * sum(parameter.numel() for parameter in self._parameters) + FORWARD_BYTES
        self._notices: list[str] = []
        self._told = False
        self._kept: dict[int, list[Tensor]] = {}

    def keep(self, number: int) -> None:
        """Copy the parameters, which are those of version `number`, and forget what is too old, or newer and from before a restart."""
        if self._samples == 0:
            if any(not 0 <= number - n < self._versions for n in self._kept):
                self._kept = {}
            if self._every and self._versions > 1 and number % self._every == 0:
                self._kept = {number: [parameter.detach().to("cpu", copy=True) for parameter in self._parameters]}
            return
        self._kept = {n: copies for n, copies in self._kept.items() if number - self._versions < n < number}
        self._kept[number] = [parameter.detach().clone() for parameter in self._parameters]

    def glance(self, batch: TrainBatch, score: Score) -> dict[str, float]:
        """See `measure`, of the version that is kept where nobody asked for any; then it is let go."""
        if self._samples or not self._kept:
            return {}
        if self._free_bytes is not None and self._free_bytes() < self._bytes:
            return {}
        found = self._measure(batch, score, GLANCE)
        if found:
            self._kept = {}
        return found

    def measure(self, batch: TrainBatch, score: Score) -> dict[str, float]:
        """Distances over the trained tokens of the chosen samples (see `distances`); nothing where no sample can be scored."""
        return self._measure(batch, score, self._samples) if self._samples else {}

    def _measure(self, batch: TrainBatch, score: Score, count: int) -> dict[str, float]:
        number = batch.version.number
        ages_N = single_age(batch)
        known = [age for age in np.unique(ages_N) if number - int(age) in self._kept]
        eligible = np.flatnonzero(np.isin(ages_N, known))
        if len(eligible) == 0:
            return {}
        chosen = eligible[np.unique(np.linspace(0, len(eligible) - 1, count).astype(np.int64))]
        sample_T = sample_of_token(batch)
        wanted = batch.loss_mask & np.isfinite(batch.sampler_logprobs) & np.isin(sample_T, chosen)
        if not wanted.any():
            return {}
        found = np.zeros(batch.num_tokens, np.float32)
        for age in np.unique(ages_N[chosen]):
            samples = chosen[ages_N[chosen] == age]
            of_age = wanted & np.isin(sample_T, samples)
            kept = self._kept[number - int(age)]
            with self._in_place([one.to(parameter.device) for one, parameter in zip(kept, self._parameters, strict=True)]):
                found[of_age] = score(batch, of_age, samples)[of_age]
        distance_T = np.where(wanted, np.abs(found - batch.sampler_logprobs), -1.0)
        metrics = distances(batch, distance_T, wanted)
        if self._samples and self._widen and self._has_room():
            furthest = sample_T[[distance_T.argmax()]]
            metrics |= self._against_float32(batch, furthest, found, score, number - int(ages_N[furthest[0]]))
        return metrics

    def notices(self) -> tuple[str, ...]:
        """What people should know, each once."""
        found, self._notices = tuple(self._notices), []
        return found

    def _has_room(self) -> bool:
        """Whether a float32 copy fits on every rank; what a step has left unused in the allocator's blocks is given back for it."""
        if self._free_bytes is None:
            return True
        if (free := self._free_bytes()) >= self._float32_bytes:
            # Blocks that activations have cut up hold no tensor of another size.
            torch.cuda.empty_cache()
            return True
        if not self._told:
            self._told = True
            self._notices.append(
                f"log-probs are not compared in float32 ({SAMPLER_ERROR}): that takes {self._float32_bytes / GIB:.1f} GiB for a moment, "
                f"{free / GIB:.1f} are free"
            )
        return False

    def _against_float32(
        self, batch: TrainBatch, sample: Indices, trainers: npt.NDArray[np.float32], score: Score, number: int
    ) -> dict[str, float]:
        wanted = batch.loss_mask & (sample_of_token(batch) == sample[0])
        with self._in_place([kept.float() for kept in self._kept[number]]):
            exact = score(batch, wanted, sample)[wanted]
        return {
            SAMPLER_ERROR: float(np.abs(batch.sampler_logprobs[wanted] - exact).max()),
            TRAINER_ERROR: float(np.abs(trainers[wanted] - exact).max()),
        }

    @contextmanager
    def _in_place(self, values: Sequence[Tensor]) -> Generator[None]:
        # What is gathered of a parameter is found by its memory, which must stay.
        cut = any(isinstance(parameter, DTensor) for parameter in self._parameters)
        current = [parameter.detach().clone() if cut else parameter.data for parameter in self._parameters]

        def put(tensors: Sequence[Tensor]) -> None:
            with torch.no_grad():
                for parameter, tensor in zip(self._parameters, tensors, strict=True):
                    if cut:
                        parameter.copy_(tensor)
                    else:
                        parameter.data = tensor
            self._written()

        try:
            put(values)
            yield
        finally:
            put(current)


def single_age(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """[N] the age of samples that one version sampled from the first token to the last; -1 for others and those that train nothing."""
    begins = batch.offsets[:-1]
    staleness_T = batch.staleness.astype(np.int64)
    oldest = np.maximum.reduceat(staleness_T, begins)
    youngest = np.minimum.reduceat(np.where(batch.loss_mask, staleness_T, np.iinfo(np.int64).max), begins)
    return np.where(oldest == youngest, oldest, -1)
