"""slime's rewards and filters on our seams: a reward of one sample or of a group, and what says which groups are trained."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.bridges.slime.args import Args, args_of
from streamrl.bridges.slime.generate import prompt_text
from streamrl.bridges.slime.sample import Sample, sample_of
from streamrl.bridges.slime.section import BESIDE_FILTER, OPTION
from streamrl.config.plugins import resolve
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode
from streamrl.schemas.tasks import RolloutTask


@lru_cache(maxsize=1)
def _tokenizer(directory: str) -> Tokenizer | None:
    return load_tokenizer(directory) if (Path(directory) / "tokenizer.json").is_file() else None


def samples_of(task: RolloutTask, episodes: Sequence[Any], args: Args) -> list[Sample]:
    """Samples of a task's episodes, with the prompt's text where the policy's tokenizer is at hand, else as the row has it."""
    tokenizer = _tokenizer(getattr(args, "hf_checkpoint", ""))
    prompt = task.prompt if tokenizer is None else prompt_text(task, tokenizer)
    parts = bool(getattr(args, "reward_key", None))
    return [sample_of(task, episode, prompt, parts=parts) for episode in episodes]


def reward_value(given: Any, args: Args) -> float | dict[str, float]:
    """What a reward function of slime's has returned; raises SchemaError for what is no number, or a table whose part is not named."""
    if not isinstance(given, Mapping):
        return _number(given, "a number, or a table of them")
    parts = {str(name): float(value) for name, value in given.items() if isinstance(value, numbers.Real | np.generic)}
    key = getattr(args, "reward_key", None)
    if not key:
        raise SchemaError(
            f"the reward is a table ({', '.join(map(str, given))}), and reward.key does not say which part is trained",
            hint="set reward.key, which is slime's --reward-key",
            key="reward.key",
        )
    return parts


def _number(given: Any, expected: str) -> float:
    item = getattr(given, "item", None)  # of a tensor or an array with one value
    value = item() if item is not None and getattr(given, "size", None) is not None else given
    if isinstance(value, str | bytes) or not isinstance(value, numbers.Real):
        raise SchemaError(f"expected a reward to be {expected}, got {given!r:.80}", hint="return float(...)")
    return float(value)


def single(function: Callable[..., Any]) -> Callable[..., Any]:
    """A reward of one sample."""

    async def score(task: RolloutTask, episode: Any, **options: Any) -> float | dict[str, float]:
        args = args_of(options)
        [sample] = samples_of(task, [episode], args)
        return reward_value(await function(args, sample, **_more(options)), args)

    return score


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """What builds a reward of groups, with its options."""

    class GroupReward:
        """Calls the function once for all samples of a task."""

        def __init__(self, **options: Any) -> None:
            self._args, self._more = args_of(options), _more(options)

        async def score(self, task: RolloutTask, episodes: Sequence[Any]) -> list[float | dict[str, float]]:
            """One value for each episode."""
            given = await function(self._args, samples_of(task, episodes, self._args), **self._more)
            if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or len(given) != len(episodes):
                got = f"{len(given)} values" if isinstance(given, Sequence) else type(given).__name__
                raise SchemaError(f"expected a list of {len(episodes)} rewards, one for each sample of the group, got {got}")
            return [reward_value(one, self._args) for one in given]

    return GroupReward


def _more(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != OPTION}


class NoSamples:
    """A data source that has none to give: rows are issued by the feeder."""

    def __call__(self, *_: Any) -> Any:
        raise SchemaError("no samples are to be had here: rows are issued one by one", hint="leave data_source alone")

    get_samples = add_samples = __call__


def keep_all(args: Args, samples: Sequence[Sample]) -> bool:
    """Stands for the dynamic filter in runs that name none: it keeps every group, and is not called."""
    return True


def keeper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of ours that calls a dynamic one of slime's, and the two others that `args` names."""
    loaded: dict[str, Callable[..., Any]] = {}

    def keep(task: RolloutTask, episodes: Sequence[Episode], **options: Any) -> list[tuple[bool, str]]:
        args = args_of(options)
        for name in BESIDE_FILTER:
            if name not in loaded and (reference := getattr(args, name, None)):
                loaded[name] = resolve(reference, what="filter", key=f"slime.{name}")
        marks, shown = (loaded.get(name) for name in BESIDE_FILTER)
        if shown is not None:
            shown(args, [_nested(samples_of(task, episodes, args))], NoSamples())
        kept, reason = (True, "") if function is keep_all else verdict(function(args, _nested(samples_of(task, episodes, args))))
        if not kept or marks is None:
            return [(kept, reason)] * len(episodes)
        samples = samples_of(task, episodes, args)
        marks(args, [_nested(samples)])
        return [(not sample.remove_sample, "remove_sample" if sample.remove_sample else "") for sample in samples]

    return keep


def _nested(samples: Sequence[Sample]) -> list[Any]:
    """A group as slime has it: a sample for each rollout, or where rollouts gave several, lists of them."""
    by_rollout: dict[int | None, list[Sample]] = {}
    for sample in samples:
        by_rollout.setdefault(sample.index, []).append(sample)
    lists = list(by_rollout.values())
    return [one for [one] in lists] if all(len(one) == 1 for one in lists) else lists


def verdict(given: Any) -> tuple[bool, str]:
    """What a dynamic filter has returned; raises SchemaError for what is no verdict."""
    keep = getattr(given, "keep", given)
    reason = getattr(given, "reason", "") or ""
    if not isinstance(keep, bool | np.bool_) or not isinstance(reason, str):
        raise SchemaError(
            f"expected a DynamicFilterOutput(keep, reason), True or False, got {given!r:.80}", hint="does every way through it return?"
        )
    return bool(keep), reason
