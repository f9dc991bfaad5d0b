"""A rollout function of slime's in a producer's place: it is called once for each task, as if that were a rollout of one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamrl.bridges.slime import session
from streamrl.bridges.slime.args import args_of
from streamrl.bridges.slime.generate import EVALUATION, prompt_text
from streamrl.bridges.slime.sample import Sample, blank, episode_of
from streamrl.bridges.slime.session import Session
from streamrl.core.seeds import rollout_seed
from streamrl.errors import SchemaError
from streamrl.producers.children.remote import in_thread
from streamrl.producers.episode import Episode
from streamrl.producers.functions import describe
from streamrl.producers.protocol import Context, Failure
from streamrl.schemas.tasks import RolloutTask


class DataSource:
    """Gives the group of one task, once; called like a function too, as some versions of slime hand it over.

    Args:
        group: samples before anything was generated.
    """

    def __init__(self, group: list[Sample]) -> None:
        self._groups = [group]

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """At most so many groups."""
        taken, self._groups = self._groups[:num_samples], self._groups[num_samples:]
        return taken

    __call__ = get_samples

    def add_samples(self, samples: Sequence[Any]) -> None:
        """There is nothing that they could be put back into."""
        if samples:
            raise SchemaError("a rollout function put samples back, but there is no buffer", hint="unfinished rollouts go on by themselves")

    def __len__(self) -> int:
        return len(self._groups)


class RolloutFunction:
    """A producer of whole groups.

    Args:
        function: the user's.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    async def rollout(self, task: RolloutTask, context: Context) -> Sequence[Episode | Failure]:
        """Episodes of the samples that come back, and a failure for every rollout that gave none."""
        asking = Session(context, evaluation=task.source == EVALUATION)
        args = args_of(context.options).but(rollout_batch_size=1, n_samples_per_prompt=task.num_rollouts)
        prompt = prompt_text(task, context.tokenizer)
        source = DataSource([blank(task, rollout, prompt) for rollout in range(task.num_rollouts)])

        def call() -> Any:
            with session.running(asking):
                return self._function(args, task.index, source, evaluation=asking.evaluation)

        return _episodes(task, _samples(await in_thread(call)), asking)


def _samples(given: Any) -> list[Any]:
    """All samples of what the function returned."""
    groups = getattr(given, "samples", given)
    if not isinstance(groups, list) or not all(isinstance(group, list) for group in groups):
        raise SchemaError(
            f"expected a rollout function to return RolloutFnTrainOutput(samples) or a list of groups, got {type(given).__name__}",
            hint="a group is a list of samples; data sets of an evaluation are [[evaluation.sets]] here",
        )
    return [sample for group in groups for one in group for sample in (one if isinstance(one, list) else [one])]


def _episodes(task: RolloutTask, samples: Sequence[Any], asking: Session) -> list[Episode | Failure]:
    found: dict[int, list[Episode | Failure]] = {}
    for sample in samples:
        rollout = int(sample.index) - task.index * task.num_rollouts
        if not 0 <= rollout < task.num_rollouts:
            raise SchemaError(f"expected samples of group {task.index}, got one with index {sample.index}", hint="keep sample.index")
        if sample.remove_sample:
            continue
        try:
            made: Episode | Failure = episode_of(sample, task, rollout, asking.asked, seed=rollout_seed(task.seed, rollout))
        except Exception as error:  # fields may hold anything: what is wrong with one sample ends its rollout
            made = Failure(rollout, "failed", describe(error))
        found.setdefault(rollout, []).append(made)
    nothing = "the rollout function returned no sample of it, or one with remove_sample"
    return [item for k in range(task.num_rollouts) for item in found.get(k, [Failure(k, "filtered", nothing)])]
