"""Makes truncated samples one token longer, so that their own last token is fed to the model too and its state gets a value. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.core.batches import STATUS_CODES, TrainBatch
from streamrl.schemas.samples import Status

_TOKENWISE: Sequence[str] = ("tokens", "loss_mask", "sampler_logprobs", "staleness", "temperature", "top_p", "top_k")


def truncated_samples(batch: TrainBatch) -> npt.NDArray[np.bool_]:
    """[N] whether a length limit ended the sample, and some of its tokens are trained."""
    trained = np.add.reduceat(batch.loss_mask, batch.offsets[:-1], dtype=np.int64) > 0
    return trained & (batch.status == STATUS_CODES[Status.TRUNCATED])


def with_ends(batch: TrainBatch, truncated: npt.NDArray[np.bool_]) -> tuple[TrainBatch, npt.NDArray[np.int64]]:
    """The batch with one more token, 0, at the end of each `truncated` sample, and the indices of these tokens.

    What is said of such a token is said of the state that the sample's last own token leaves; the token itself is predicted, and so never
    fed to a model. Good for values only: the routing of experts, candidates and what logits were changed by are left out.

    Args:
        batch: of non-empty samples.
        truncated: [N]

    Example:
        >>> batch = TrainBatch.from_lists([[5], [5]], [[6, 7], [8]])
        >>> longer, ends = with_ends(batch, np.array([True, False]))
        >>> longer.tokens.tolist(), longer.offsets.tolist(), ends.tolist()
        ([5, 6, 7, 0, 5, 8], [0, 4, 6], [3])
    """
    at = batch.offsets[1:][truncated]
    offsets = batch.offsets + np.append(0, np.cumsum(truncated))
    arrays = {name: np.insert(getattr(batch, name), at, 0) for name in _TOKENWISE}
    unsaid = dict.fromkeys(("min_p", "logit_biases", "routed_experts", "candidates"))
    return replace(batch, offsets=offsets, **unsaid, **arrays), offsets[1:][truncated] - 1
