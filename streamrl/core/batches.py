"""What a trainer is given: packed token sequences as numpy arrays. Letters: `T` tokens of the batch, `N` samples."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.schemas.versions import Version


class TrainBatch(msgspec.Struct, frozen=True, kw_only=True):
    """One batch, packed: sample n's tokens are `tokens[offsets[n] : offsets[n + 1]]`. Sorted by task, rollout, sample."""

    kind: Literal["sft", "rl"]
    """Which loss: demonstrations, or policy gradient."""
    version: Version
    """The version trained from."""
    stage_step: int
    """Batches of this kind trained before this one (drives the learning-rate schedule)."""
    tokens: npt.NDArray[np.int32]
    """[T]"""
    offsets: npt.NDArray[np.int64]
    """[N + 1], offsets[0] = 0, offsets[N] = T"""
    loss_mask: npt.NDArray[np.bool_]
    """[T]; True where the token is trained on; never at a sequence's first token."""
    sampler_logprobs: npt.NDArray[np.float32]
    """[T]; 0.0 where no model sampled the token."""
    staleness: npt.NDArray[np.int32]
    """[T]; version trained from minus version that sampled the token; 0 where no model did."""
    temperature: npt.NDArray[np.float32]
    """[N]; logits are divided by it before the log-softmax (1.0 for demonstrations)."""
    top_p: npt.NDArray[np.float32]
    """[N]; 1.0 = off."""
    top_k: npt.NDArray[np.int32]
    """[N]; -1 = off."""
    rewards: npt.NDArray[np.float64]
    """[N]; NaN where there is none."""
    tasks: npt.NDArray[np.int64]
    """[N]; the group's id. Samples of one group are neighbours."""
    rollouts: npt.NDArray[np.int64]
    """[N]; index of the rollout within its group. Samples of one rollout share reward and vote."""

    @property
    def num_samples(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[N] tokens of each sample."""
        return np.diff(self.offsets)


def sample_of_token(batch: TrainBatch) -> npt.NDArray[np.int64]:
    """[T] index of the sample that each packed token belongs to."""
    return np.repeat(np.arange(batch.num_samples, dtype=np.int64), batch.lengths)


def samples_at(batch: TrainBatch, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """[M] index of the sample that each of the packed tokens `tokens` [M] belongs to: `sample_of_token(batch)[tokens]`, in O(M log N)."""
    return np.searchsorted(batch.offsets, tokens, side="right") - 1
