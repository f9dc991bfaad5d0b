"""slime's hooks of the trainer: rewards of a batch, advantages, the correction of the policy loss.

Letters: `T` tokens of the batch, `N` samples, `M` tokens of a micro-batch, `S` its samples. A response goes from a sample's first trained
token to the sample's end, so that `tokens[-response_length:]` are its tokens; none of a sample without a trained token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.algorithms.estimators import TokenArrays
from streamrl.bridges.slime.args import Args
from streamrl.bridges.slime.flags import loss_flags
from streamrl.bridges.slime.sample import Sample, SampleStatus
from streamrl.config.loss import LossConfig
from streamrl.core.batches import STATUS_CODES, TrainBatch, sample_of_token
from streamrl.errors import ConfigError

Floats = npt.NDArray[np.float64]
_AGAIN = "mend the function; with the same batch it would return the same again"
_STATUS = {code: SampleStatus(status) for status, code in STATUS_CODES.items()}


def adapted(flag: str, function: Callable[..., Any], reference: str) -> Any:
    """The function at our key that calls slime's."""
    match flag:
        case "custom_reward_post_process_path":
            return _Rewards(function, reference)
        case "custom_advantage_function_path":
            return _Advantages(function, reference)
        case _:
            return _correction(function, reference)


class _InTrainer(Sample):
    """A sample as a batch has it, without text and without what its row says."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("prompt", "response", "label", "metadata"):
            raise AttributeError(
                f"sample.{name} is not there in the trainer, which has tokens, masks, log-probs and rewards; custom_rm_path sees the rest"
            )
        return super().__getattribute__(name)


class _Rewards:
    """Advantages that are a batch's rewards as a function has processed them."""

    def __init__(self, function: Callable[..., Any], reference: str, args: Args | None = None) -> None:
        self._function = function
        self._reference = reference
        self._args = args

    def with_loss(self, loss: LossConfig) -> _Rewards:
        """The same, told what `args` says."""
        return _Rewards(self._function, self._reference, Args({**loss_flags(loss), "reward_key": None}))

    def __call__(self, batch: TrainBatch, arrays: TokenArrays) -> Floats:
        """[T] of the whole batch."""
        given = self._function(self._args, _samples(batch))
        if not isinstance(given, tuple | list) or len(given) != 2 or any(np.shape(one) != (batch.num_samples,) for one in given):
            raise ConfigError(
                f"expected {self._reference} to return (raw_rewards, rewards), a number for each of {batch.num_samples} samples, "
                f"got {given!r:.80}",
                hint=_AGAIN,
                function=self._reference,
            )
        rewards_N = np.array([float(value) for value in given[1]], np.float64)
        return np.where(arrays.mask, rewards_N[sample_of_token(batch)], 0.0)


def _samples(batch: TrainBatch) -> list[Sample]:
    found: list[Sample] = []
    group = int(batch.rollouts.max()) + 1
    for n, response in enumerate(_responses(batch, batch.loss_mask)):
        found.append(
            _InTrainer(
                group_index=int(batch.tasks[n]),
                index=int(batch.tasks[n]) * group + int(batch.rollouts[n]),
                tokens=batch.tokens[int(batch.offsets[n]) : response.stop].tolist(),
                response_length=response.stop - response.start,
                reward=float(batch.rewards[n]),
                loss_mask=batch.loss_mask[response].astype(int).tolist(),
                rollout_log_probs=batch.sampler_logprobs[response].tolist(),
                status=_STATUS[int(batch.status[n])],
            )
        )
    return found


class _Advantages:
    """Advantages that a function puts into slime's table of a batch."""

    def __init__(self, function: Callable[..., Any], reference: str, loss: LossConfig | None = None) -> None:
        self._function = function
        self._reference = reference
        self._loss = loss or LossConfig()

    def with_loss(self, loss: LossConfig) -> _Advantages:
        """The same, told what `args` says."""
        return _Advantages(self._function, self._reference, loss)

    def __call__(self, batch: TrainBatch, arrays: TokenArrays) -> Floats:
        """[T] of the whole batch."""
        import torch

        spans = _responses(batch, arrays.mask)

        def spread(values_T: npt.NDArray[Any]) -> list[Any]:
            return [torch.from_numpy(values_T[span].copy()) for span in spans]

        data: dict[str, Any] = {
            "tokens": [torch.from_numpy(part.astype(np.int64)) for part in np.split(batch.tokens, batch.offsets[1:-1])],
            "total_lengths": batch.lengths.tolist(),
            "response_lengths": [span.stop - span.start for span in spans],
            "loss_masks": spread(arrays.mask.astype(np.int32)),
            "rewards": batch.rewards.tolist(),
            "raw_reward": batch.rewards.tolist(),
            "truncated": [int(_STATUS[int(code)] is SampleStatus.TRUNCATED) for code in batch.status],
            "sample_indices": list(range(batch.num_samples)),
            "rollout_log_probs": spread(batch.sampler_logprobs),
        }
        named = {
            "log_probs": arrays.logprobs,
            "ref_log_probs": arrays.reference,
            "teacher_log_probs": arrays.teacher,
            "values": arrays.values,
            "kl": arrays.kl,
        }
        data |= {name: spread(values) for name, values in named.items() if values is not None}
        self._function(Args(loss_flags(self._loss)), data)
        return self._packed(batch, spans, data.get("advantages"))

    def _packed(self, batch: TrainBatch, spans: Sequence[slice], given: Any) -> Floats:
        lengths = [span.stop - span.start for span in spans]
        if given is None or [len(one) for one in given] != lengths:
            got = "none" if given is None else [len(one) for one in given][:8]
            raise ConfigError(
                f"expected {self._reference} to set rollout_data['advantages'] to a tensor for each response, of lengths {lengths[:8]}, "
                f"got {got}",
                hint=_AGAIN,
                function=self._reference,
            )
        found = np.zeros(batch.num_tokens)
        for span, one in zip(spans, given, strict=True):
            found[span] = np.asarray(one, np.float64)
        return found


def _responses(batch: TrainBatch, mask: npt.NDArray[np.bool_]) -> list[slice]:
    """[N] from the first trained token of each sample to its end; empty where it has none."""
    found: list[slice] = []
    for begin, end in zip(batch.offsets.tolist(), batch.offsets.tolist()[1:], strict=False):
        trained = np.flatnonzero(mask[begin:end])
        found.append(slice(begin + int(trained[0]) if len(trained) else end, end))
    return found


def _correction(function: Callable[..., Any], reference: str) -> Callable[..., Any]:
    """A policy loss: PPO's, then what the function makes of it."""
    import torch
    from msgspec.structs import replace

    from streamrl.algorithms.policy import PolicyTokens, policy_loss

    def loss_of(tokens: PolicyTokens, config: LossConfig) -> tuple[Any, Mapping[str, Any]]:
        surrogate, measured = policy_loss(tokens, replace(config, policy="ppo"))
        kept = tokens.sequences.mask
        # [S] numbers at the samples of the micro-batch, so that each trained token knows whose it is.
        count_S = tokens.sequences.sum(kept.to(surrogate.dtype))
        owner = tokens.sequences.spread(torch.arange(len(count_S), device=kept.device))
        order = torch.argsort(torch.where(kept, owner, len(count_S)), stable=True)[: int(kept.sum())]
        lengths = [int(one) for one in count_S.tolist() if one]

        def split(values: Any) -> list[Any]:
            return list(values[order].split(lengths))

        masks = split(torch.ones_like(surrogate))
        returned = function(
            args=Args(loss_flags(config)),
            pg_loss=surrogate[order],
            train_log_probs=split(tokens.proximal.detach()),
            rollout_log_probs=split(tokens.sampler),
            loss_masks=masks,
            total_lengths=lengths,
            response_lengths=lengths,
        )
        if not isinstance(returned, tuple | list) or len(returned) != 3 or not isinstance(returned[2], Mapping):
            raise ConfigError(
                f"expected {reference} to return (pg_loss, masks, metrics), the last one a table, got {returned!r:.80}",
                hint=_AGAIN,
                function=reference,
            )
        given, new_masks, metrics = returned
        keep = _flat([torch.as_tensor(one, device=kept.device) for one in new_masks], reference, len(order), "masks")
        flat = _flat(given, reference, len(order), "a loss") * keep
        found = torch.zeros_like(surrogate).index_put((order,), flat.to(surrogate.dtype))
        told = dict(measured)
        for name, values in metrics.items():
            numbers = _flat(values, reference, len(order), f"the metric {name}").detach().to(surrogate.dtype)
            told[name if "/" in name else f"train/{name}"] = torch.zeros_like(surrogate).index_put((order,), numbers)
        return found, told

    return loss_of


def _flat(given: Any, reference: str, count: int, what: str) -> Any:
    """[M] of a tensor or a list of them, one for each response; raises ConfigError for another number of values."""
    import torch

    values = torch.cat(list(given)) if isinstance(given, list | tuple) else given
    if not isinstance(values, torch.Tensor) or values.shape != (count,):
        raise ConfigError(
            f"expected {reference} to return {what} of {count} tokens, got {getattr(values, 'shape', type(values).__name__)}",
            hint=_AGAIN,
            function=reference,
        )
    return values
