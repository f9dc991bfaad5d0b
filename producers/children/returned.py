"""What user code gave, as it is handed to the parent: episodes with the model's turns by number, rewards as numbers, errors in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.children.frames import Ended, Piece, Returned, Scored, Value
from streamrl.producers.children.remote import Asking
from streamrl.producers.children.sampled import Sampled
from streamrl.producers.episode import Episode
from streamrl.producers.functions import DETAIL_LENGTH, describe
from streamrl.producers.protocol import Failure
from streamrl.rewards.functions import as_value, number
from streamrl.rewards.protocol import RewardValue
from streamrl.schemas.samples import Status

MOST_METADATA_BYTES = 1 << 20
"""Most that an episode may have, as JSON."""


def settled(asking: Asking, given: Any, rollouts: Sequence[int]) -> Ended:
    """What a producer gave, for the parent: episodes and failures; what cannot be handed over is a failure."""
    kept: list[Returned] = []
    failures: list[Failure] = []
    sampled = Sampled(asking.turns)
    try:
        for item in given:
            if isinstance(item, Failure):
                failures.append(Failure(int(item.rollout), str(item.reason), str(item.detail)[:DETAIL_LENGTH]))
            elif isinstance(item, Episode):
                try:
                    kept.append(returned(item, sampled))
                except Exception as error:  # fields may hold anything, and a class of the user's may raise anything when it is read
                    failures.append(Failure(item.rollout, "failed", describe(error)))
            else:
                raise TypeError(f"expected Episodes and Failures, got {type(item).__name__}")
    except Exception as error:  # what it gave may be a generator, which is user code too
        return Ended(call=asking.call, failures=tuple(Failure(rollout, "failed", describe(error)) for rollout in rollouts))
    return Ended(call=asking.call, given=tuple(kept), failures=tuple(failures))


def returned(episode: Episode, sampled: Sampled) -> Returned:
    """An episode for the parent; raises SchemaError for what cannot be stored, TypeError or ValueError for what is no number or status."""
    try:
        # As it goes onto the wire; what it does not take (arrays, numbers of numpy) would end the worker there.
        metadata = msgspec.json.encode(episode.metadata) if episode.metadata else b""
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SchemaError(
            f"the episode's metadata cannot be stored: {error}", hint="give it plain numbers, texts, lists and tables"
        ) from error
    if len(metadata) > MOST_METADATA_BYTES:
        raise SchemaError(
            f"the episode's metadata may have {MOST_METADATA_BYTES} bytes, got {len(metadata)}",
            hint="it is kept with every sample: write what is larger to a file, and its name here",
        )
    if metadata and not metadata.startswith(b"{"):
        raise SchemaError(f"the episode's metadata must be a table, got {type(episode.metadata).__name__}")
    return Returned(
        rollout=episode.rollout,
        pieces=tuple(
            Piece(turns=sampled.parts_of(segment)) if segment.is_model else Piece(tuple(int(token) for token in segment.token_ids))
            for segment in episode.segments
            if len(segment.token_ids)
        ),
        finish_reason=episode.finish_reason,
        status=Status(episode.status),
        texts=tuple(str(text) for text in episode.turns),
        sampling=episode.sampling,
        seed=episode.seed,
        reward=None if episode.reward is None else number(episode.reward, "reward"),
        agent=str(episode.agent or ""),
        reward_parts={str(name): number(value, f"part {name!r}") for name, value in episode.reward_parts.items()},
        metadata=metadata,
        branch=episode.branch,
        started_s=episode.started_s,
        finished_s=episode.finished_s,
    )


def valued(call: int, given: Any, num_episodes: int) -> Scored:
    """A reward's values for the parent: one for each episode, or one error for all."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return Scored(call, error=f"expected one reward for each of {num_episodes} episodes, got {type(given).__name__}")
    if len(given) != num_episodes:
        return Scored(call, error=f"expected one reward for each of {num_episodes} episodes, got {len(given)}")
    return Scored(call, tuple(_value(one) for one in given))


def _value(given: Any) -> Value:
    if isinstance(given, BaseException):
        return Value(error=describe(given))
    try:
        value: RewardValue = as_value(given)
        return Value(float(value.value), {str(name): float(part) for name, part in value.parts.items()})
    except Exception as error:  # as above
        return Value(error=describe(error))
