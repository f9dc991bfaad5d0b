"""Rewards that others compute: what a producer asks for, and how an answer finds the samples that it is for.

```text
producer   rolls a task out       -> request onto `grading`: the task and all its episodes, as the reward would have seen them
                                  -> samples without a reward, which name the request by its sequence; the task is done
rewarder   claims the request     -> scores all episodes together -> a reward, or a tombstone, for each rollout, which names the request
                                  -> acknowledges the request
trainer    folds                     an answer is for the samples that name its request (`streamrl.core.gradings`)
```

A reward may compare the rollouts of a group, so a group is one message and one claim: a rewarder has in hand all that it needs, the texts
too, and reads neither samples nor data. The request is stored first. So whatever of an attempt's samples is on the stream, its request
has been made: a producer that dies in between leaves at worst a request whose answers are for nobody. The next producer's attempt asks
anew, under another number. Of both attempts the samples that came first count, and only answers to their own request reward them,
whichever rewarder is faster.

The message id of an answer is made of its request, rollout and revision: a rewarder that takes over from one that died stores what is
missing, and what it repeats changes nothing. Work is shared by the queue's consumer, which the run has made.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode, bare
from streamrl.producers.protocol import Failure
from streamrl.producers.publishing import MAX_BYTES, Publisher
from streamrl.schemas.samples import Sample
from streamrl.schemas.tasks import RolloutTask

REVISION = 1
"""Of a rewarder's answers; later corrections have a higher one."""
_UNPACKED_BYTES = 256 << 20
"""Most that a request is unpacked to."""


class GradingRequest(msgspec.Struct, frozen=True):
    """One attempt at a task, to be scored. On the wire as MessagePack with zlib (level 1): a token takes some 7 bytes."""

    task: RolloutTask
    episodes: tuple[Episode, ...]
    """All of them, without what was recorded of experts. Those of rollouts that their producer has rewarded are for comparison only."""

    @property
    def rollouts(self) -> tuple[int, ...]:
        """The rollouts that need a reward, rising."""
        return tuple(sorted({rollout for rollout, _ in self.waiting}))

    @property
    def waiting(self) -> tuple[tuple[int, str], ...]:
        """(rollout, agent) of the rewards that are needed, rising; the empty agent is the rollout itself."""
        return unrewarded(self.episodes)

    def encode(self) -> bytes:
        """Raises SchemaError for what cannot be written, such as integers above 64 bits."""
        try:
            return zlib.compress(msgspec.msgpack.encode(self), 1)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise SchemaError(f"an episode cannot be handed over to be scored: {error}") from error

    @classmethod
    def decode(cls, body: bytes) -> GradingRequest:
        """Raises SchemaError: other bytes, more than 256 MiB unpacked, or episodes that are not valid."""
        try:
            unpacking = zlib.decompressobj()
            data = unpacking.decompress(body, _UNPACKED_BYTES)
            if not unpacking.eof:
                raise SchemaError(f"expected a request of at most {_UNPACKED_BYTES} bytes unpacked, got more, or one that is cut off")
            return msgspec.msgpack.decode(data, type=cls)
        except (zlib.error, msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise SchemaError(f"expected a request for rewards, got {len(body)} bytes that are none: {error}") from error


def unrewarded(episodes: Sequence[Episode]) -> tuple[tuple[int, str], ...]:
    """(rollout, agent) of which no episode has a reward, rising: a producer's own stands."""
    rewarded = {(episode.rollout, episode.agent) for episode in episodes if episode.reward is not None}
    return tuple(sorted({(episode.rollout, episode.agent) for episode in episodes} - rewarded))


async def ask_for_rewards(
    publisher: Publisher, task: RolloutTask, episodes: Sequence[Episode], samples: Sequence[Sample]
) -> tuple[list[Sample], list[Failure]]:
    """Store the request for what has no reward yet.

    Returns:
        The samples, which name the request where they wait for its answer, and failures in place of those that cannot be asked for.
    """
    waiting = tuple(sorted({rollout for rollout, _ in unrewarded(episodes)}))
    if not waiting:
        return list(samples), []
    bared = tuple(msgspec.structs.replace(episode, segments=bare(episode.segments)) for episode in episodes)
    try:
        body = GradingRequest(task, bared).encode()
        if len(body) > MAX_BYTES:
            raise SchemaError(f"to have its group scored takes a message of {len(body)} bytes, at most {MAX_BYTES} fit")
    except SchemaError as error:
        kept = [sample for sample in samples if sample.rollout not in waiting]
        return kept, [Failure(rollout, "failed", f"reward: {error.message}") for rollout in waiting]
    number = await publisher.grading(task, body)
    named = [msgspec.structs.replace(sample, grading=number) if sample.rollout in waiting else sample for sample in samples]
    return named, []
