"""Episodes: what one run of a producer made, as a token sequence in segments, and from there to `Sample` rows.

```text
prompt | model (ids, log-probs, versions) | tool result | model | ...       segments, in order
  0    |              1                   |      0      |   1              loss mask
```

The model's tokens are kept exactly as the engine gave them and are never decoded and tokenised again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, islice
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.errors import SchemaError
from streamrl.schemas.candidates import Candidates
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.samples import (
    LEAST_LOGPROB,
    MOST_LOGPROB,
    Branch,
    LogprobMode,
    Sample,
    Status,
    TurnSpan,
    VersionSpan,
    is_agent,
    is_turn_temperature,
)
from streamrl.schemas.tasks import RolloutTask, Sampling

STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}
"""Status of an episode whose last turn ended with this finish reason."""
_SAME_S = 0.05
"""Times that differ by less than this are said once."""


class Origin(msgspec.Struct, frozen=True):
    """Who made a turn and when, in Unix seconds, 0.0 where not known; for people and metrics only."""

    engine: str = ""
    finish_reason: str = ""
    asked_s: float = 0.0
    began_s: float = 0.0
    """At which the engine began to compute it."""
    finished_s: float = 0.0
    counters: dict[str, float] = {}
    """Of the engine, by their names in `streamrl.engines.extras`."""


_NOBODY = Origin()


class Segment(msgspec.Struct, frozen=True):
    """Consecutive tokens of one origin: the model, when there are `spans`; the prompt or the environment (masked), when there are none."""

    token_ids: Sequence[int]
    logprobs: Sequence[float] = ()
    """Natural log of the probability each token was drawn with; empty for the environment."""
    spans: tuple[VersionSpan, ...] = ()
    """Versions that sampled the tokens, covering them in order."""
    inexact: bool = False
    """Whether these versions are guesses. Tokens drawn with penalties or a grammar count as inexact too, whatever this says."""
    temperature: float | None = None
    """At which the tokens were drawn; None: the episode's."""
    origin: Origin | None = None
    experts: RoutedExperts | None = None
    """Of the call that gave them, where its engine says so: of all tokens up to the last one of these, which is left out."""
    sampling: Sampling | None = None
    """How the tokens were drawn; None: as the episode says, but for `temperature`."""
    candidates: Candidates | None = None
    """Of each token, where its engine says them."""

    @property
    def is_model(self) -> bool:
        """Whether a model sampled these tokens."""
        return bool(self.spans)


class Episode(msgspec.Struct, kw_only=True):
    """One token sequence of a rollout.

    A rollout may give several (helpers, compaction); they share its reward, which counts once, but for those of an `agent`.

    `streamrl.producers.chat.Chat.episode` builds it; built by hand it is checked in the same way.

    Example: a prompt of two tokens and one sampled token; `Segment(ids)` alone is the environment's, and is not trained on.

        >>> from streamrl.schemas.versions import Version
        >>> answer = Segment(token_ids=[5], logprobs=[-0.7], spans=(VersionSpan(1, Version(0, 3)),))
        >>> episode = Episode(segments=(Segment(token_ids=[7, 8]), answer), finish_reason="stop", turns=("5",))
        >>> episode.num_tokens, episode.completion
        (3, '5')

    Raises:
        SchemaError: nothing to train on, a first token from a model, columns that do not fit, log-probs that are not finite or above 0.
    """

    segments: tuple[Segment, ...]
    finish_reason: str
    """`stop`, `length` or `abort`: how its last turn ended."""
    status: Status = Status.COMPLETED
    turns: tuple[str, ...] = ()
    """Decoded text of each of the model's turns, stop token left out."""
    sampling: Sampling = Sampling()
    logprob_mode: LogprobMode = LogprobMode.SAMPLED
    seed: int = 0
    engine: str = ""
    rollout: int = 0
    """Index of its rollout within the task's group."""
    reward: float | None = None
    """Set by the producer; None leaves it to the run's reward."""
    agent: str = ""
    """Whose it is, where that is an agent with a reward of its own (`streamrl.schemas.samples.is_agent`): then `reward` is the agent's, and
    its other episodes of the rollout share it."""
    reward_parts: dict[str, float] = {}
    metadata: dict[str, Any] = {}
    """Kept with the sample, beside the task's own."""
    branch: Branch | None = None
    """Where it has left an episode that its rollout gives before it: what both begin with is trained there only."""
    lineage: tuple[tuple[int, int], ...] = ()
    """How its chat left others (`streamrl.producers.branches`), from which `branch` is known once all episodes of the rollout are."""
    started_s: float = 0.0
    finished_s: float = 0.0
    thinking: bool = False
    """True if its last turn begins within a thought that the prompt has opened; set before it is scored."""
    scored_s: float = 0.0
    """Unix seconds at which its reward was known; set by the worker."""
    is_answer: bool = False
    """Whether it ends with its rollout's answer: then its reward is the rollout's, else that of the last episode is."""

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise SchemaError(f"an episode of rollout {self.rollout} is not valid: {problem}", hint="build it with engine.chat(task)")

    @property
    def completion(self) -> str:
        """Text of the last turn."""
        return self.turns[-1] if self.turns else ""

    @property
    def asked_ids(self) -> Sequence[int]:
        """The last tokens before its last turn: of its prompt, or of the environment."""
        turns = [place for place, segment in enumerate(self.segments) if segment.is_model and segment.token_ids]
        place = turns[-1] if turns else 0
        while place and (self.segments[place].is_model or not self.segments[place].token_ids):
            place -= 1  # a turn may be handed over in pieces
        return self.segments[place].token_ids

    @property
    def num_sampled(self) -> tuple[int, ...]:
        """Tokens of each of the model's turns, without those that a branch shares."""
        shared = 0 if self.branch is None else self.branch.num_shared
        ends = accumulate(len(segment.token_ids) for segment in self.segments)
        turns = ((len(segment.token_ids), end) for segment, end in zip(self.segments, ends, strict=True) if segment.is_model)
        return tuple(min(length, end - shared) for length, end in turns if end > shared)

    @property
    def num_tokens(self) -> int:
        """All tokens, prompt included."""
        return sum(len(segment.token_ids) for segment in self.segments)


def _problem(episode: Episode) -> str:
    if not episode.segments or episode.segments[0].is_model or not episode.segments[0].token_ids:
        return "it must begin with at least one prompt token (nothing predicts the first token)"
    if not any([segment.spans for segment in episode.segments]):
        return "no turn was generated (`await chat.generate()`): it has no model tokens, so there is nothing to train on"
    if episode.finish_reason not in STATUS:
        return f"finish_reason must be one of {', '.join(STATUS)}, got {episode.finish_reason!r}"
    if episode.agent and not is_agent(str(episode.agent)):
        return f"its agent must be a name of letters, digits and _.- with at most one slash, such as solver/2, got {episode.agent!r}"
    if episode.reward is not None:
        if isinstance(episode.reward, str | bytes):
            return f"its reward must be a number, got the text {episode.reward!r}"
        if not math.isfinite(episode.reward):
            return f"its reward must be finite, got {episode.reward}"
    for position, segment in enumerate(episode.segments):
        problem = _segment_problem(segment) or _temperature_problem(episode, segment)
        if problem:
            return f"segment {position}: {problem}"
    return ""


def _segment_problem(segment: Segment) -> str:
    length = len(segment.token_ids)
    if not segment.is_model:
        return f"environment tokens have no log-probs, got {len(segment.logprobs)}" if segment.logprobs else ""
    if len(segment.logprobs) != length:
        return f"expected one log-prob for each of {length} model tokens, got {len(segment.logprobs)}"
    covered = 0
    for span in segment.spans:
        covered += span.length
        if span.version is None or span.length < 1:
            return "every version span of model tokens needs a version and at least one token"
    if covered != length:
        return f"expected version spans over {length} model tokens, they cover {covered}"
    if not all(LEAST_LOGPROB <= value <= MOST_LOGPROB for value in segment.logprobs):
        return f"log-probs must be {LEAST_LOGPROB:g} to 0"
    return ""


def _temperature_problem(episode: Episode, segment: Segment) -> str:
    """One turn that no trainer takes would cost its whole group."""
    temperature = segment.temperature if segment.sampling is None else segment.sampling.temperature
    if not segment.is_model or temperature in (None, episode.sampling.temperature) or is_turn_temperature(temperature or 0.0):
        return ""
    return f"a turn's temperature must be above 0 and finite, or None for the episode's own, got {temperature}"


def samples_of(task: RolloutTask, episodes: Sequence[Episode], *, producer: str, more: Mapping[str, Any] | None = None) -> list[Sample]:
    """Rows for the stream, sorted by rollout and, within one, in the order given.

    Every rollout's samples get the reward of its answer (`is_answer`), else of its last episode that has one, and the fields `more`. Those
    of agents take no part in that unless all are of agents; they get their agent's reward too, found in the same way. Nothing of the task's
    baseline is trained.

    Raises:
        SchemaError: an episode of a rollout that the task does not have, or a branch of none.
    """
    by_rollout: dict[int, list[Episode]] = {}
    for episode in episodes:
        if not 0 <= episode.rollout < task.num_rollouts:
            raise SchemaError(f"task {task.index} has rollouts 0 to {task.num_rollouts - 1}, got an episode of rollout {episode.rollout}")
        by_rollout.setdefault(episode.rollout, []).append(episode)
    for of_rollout in by_rollout.values():
        if problem := branch_problem(of_rollout):
            raise SchemaError(problem)
    told = {"producer": producer, **more} if more else {"producer": producer}
    return [
        _sample(task, episode, index, of_rollout, told)
        for _, of_rollout in sorted(by_rollout.items())
        for index, episode in enumerate(of_rollout)
    ]


def branch_problem(of_rollout: Sequence[Episode]) -> str:
    """What is wrong with the branches among the episodes of a rollout, in their order; empty: nothing."""
    for index, episode in enumerate(of_rollout):
        if episode.branch is None:
            continue
        parent, shared = episode.branch.parent, episode.branch.num_shared
        place = f"episode {index} of rollout {episode.rollout} is a branch"
        if not 0 <= parent < index:
            return f"{place}: expected its parent among the {index} episodes before it, got {parent}"
        if not 0 < shared < episode.num_tokens or _first(episode, shared) != _first(of_rollout[parent], shared):
            return f"{place}: expected it to begin with {shared} tokens of episode {parent} and to go on"
        if not sum(episode.num_sampled):
            return f"{place}: no token behind the {shared} that it shares was sampled, so there is nothing to train on"
    return ""


def _first(episode: Episode, count: int) -> list[int]:
    return list(islice(chain.from_iterable(segment.token_ids for segment in episode.segments), count))


def reward_of(of_rollout: Sequence[Episode]) -> Episode | None:
    """Of a rollout's episodes the one whose reward is the rollout's, which is not an agent's where there are others; None: none has one."""
    return _rewarded([e for e in of_rollout if not e.agent] or of_rollout)


def _rewarded(episodes: Sequence[Episode]) -> Episode | None:
    """The one of these whose reward is that of all."""
    found = next((e for e in episodes if e.is_answer), episodes[-1])
    return found if found.reward is not None else next((e for e in reversed(episodes) if e.reward is not None), None)


def _sample(task: RolloutTask, episode: Episode, index: int, of_rollout: Sequence[Episode], told: dict[str, Any]) -> Sample:
    rewarded = reward_of(of_rollout)
    own = _rewarded([e for e in of_rollout if e.agent == episode.agent]) if episode.agent else None
    parts = own if episode.agent else rewarded
    tokens: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    spans: list[VersionSpan] = []
    turns: list[tuple[int, Segment]] = []
    for segment in episode.segments:
        length = len(segment.token_ids)
        if not length:
            continue
        if segment.spans:
            turns.append((len(tokens), segment))
            logprobs += segment.logprobs
            mask += [int(episode.rollout != task.baseline)] * length
            spans += segment.spans
        else:
            logprobs += [0.0] * length
            mask += [0] * length
            spans.append(VersionSpan(length, None))
        tokens += segment.token_ids
    if episode.branch is not None:
        shared = episode.branch.num_shared
        mask[:shared] = [0] * shared
        turns = [(start, turn) for start, turn in turns if start + len(turn.token_ids) > shared]
    return Sample(
        run=task.run,
        policy=task.policy,
        source=task.source,
        task=task.index,
        rollout=episode.rollout,
        sample=index,
        group_size=task.num_rollouts,
        num_samples=len(of_rollout),
        data_epoch=task.data_epoch,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(mask, np.uint8),
        logprobs=np.array(logprobs, np.float32),
        spans=tuple(spans),
        logprob_mode=episode.logprob_mode,
        reward=rewarded.reward if rewarded else None,
        reward_parts=parts.reward_parts if parts else {},
        status=episode.status,
        finish_reason=episode.finish_reason,
        sampling=episode.sampling,
        seed=episode.seed,
        label=task.label,
        metadata={**task.metadata, **episode.metadata} if episode.metadata else task.metadata,
        engine=episode.engine,
        started_s=episode.started_s,
        finished_s=episode.finished_s,
        began_s=(turns[0][1].origin or _NOBODY).began_s,
        scored_s=episode.scored_s,
        branch=episode.branch,
        counters=_counters(turns),
        agent=episode.agent,
        agent_reward=own.reward if own else None,
        images=None if isinstance(task.image_blob, msgspec.UnsetType) else task.image_blob,
        image_rows=task.images,
        turns=() if _told_by(episode, turns) else tuple(_turn(episode, *turn) for turn in turns),
        **told,
    )


def _counters(turns: Sequence[tuple[int, Segment]]) -> dict[str, float]:
    """Sums over the calls that gave these turns; one that was handed over in pieces counts once."""
    calls = {id(turn.origin): turn.origin for _, turn in turns if turn.origin is not None}
    total: dict[str, float] = {}
    for call in calls.values():
        for name, value in call.counters.items():
            total[name] = total.get(name, 0.0) + value
    return total


def routed_experts(episode: Episode) -> npt.NDArray[np.unsignedinteger] | None:
    """[t, layers, k] experts of its first t tokens, each those of the call that computed the token; None where a turn does not say.

    Example: a prompt of 3, a turn of 2, a tool's 2, a turn of 2. The first call says those of 4 tokens, the second of 8: the last token of
    a turn is computed by the next call.

        tokens      0 1 2 | 3 4 | 5 6 | 7 8
        of call     1 1 1   1 2   2 2   2
    """
    pieces: list[npt.NDArray[np.unsignedinteger]] = []
    end = covered = 0
    for segment in episode.segments:
        end += len(segment.token_ids)
        if not segment.is_model:
            continue
        found = None if segment.experts is None else segment.experts.array()
        if found is None or len(found) < end - 1 or (pieces and found.shape[1:] != pieces[0].shape[1:]):
            return None
        pieces.append(found[covered : end - 1])
        covered = end - 1
    return np.concatenate(pieces) if pieces else None


def bare(segments: Sequence[Segment]) -> tuple[Segment, ...]:
    """The same without experts and candidates: for who has no use for them."""
    nothing = {"experts": None, "candidates": None}
    return tuple(msgspec.structs.replace(one, **nothing) if one.experts or one.candidates else one for one in segments)


def _told_by(episode: Episode, turns: Sequence[tuple[int, Segment]]) -> bool:
    """Whether the episode itself says all that is known of its turns: they are one, made as it says, which took all its time."""
    for _, turn in turns:
        if _is_inexact(episode, turn) or _own_sampling(episode, turn):
            return False
        made = turn.origin
        if made is None or not made.asked_s:
            continue
        around_s = abs(made.asked_s - episode.started_s) + abs(made.finished_s - episode.finished_s)
        if len(turns) > 1 or made.engine != episode.engine or not around_s < _SAME_S:
            return False
    return True


def drawn(episode: Episode, turn: Segment) -> Sampling:
    """How the tokens of a turn were drawn."""
    if turn.sampling is not None:
        return turn.sampling
    if turn.temperature is None or turn.temperature == episode.sampling.temperature:
        return episode.sampling
    return msgspec.structs.replace(episode.sampling, temperature=turn.temperature)


def _is_inexact(episode: Episode, turn: Segment) -> bool:
    return turn.inexact or drawn(episode, turn).inexact


def _own_sampling(episode: Episode, turn: Segment) -> dict[str, Any]:
    """What a turn was drawn otherwise with than its episode says, as JSON has it. How long it might have become is no such thing."""
    sampling = drawn(episode, turn)
    if sampling is episode.sampling:
        return {}
    changes = sampling.changes(msgspec.structs.replace(episode.sampling, max_new_tokens=sampling.max_new_tokens))
    return msgspec.to_builtins(changes, str_keys=True)


def _turn(episode: Episode, start: int, turn: Segment) -> TurnSpan:
    made = {} if turn.origin is None else msgspec.structs.asdict(turn.origin)
    made.pop("counters", None)  # they are the sample's
    sampling, inexact = _own_sampling(episode, turn), _is_inexact(episode, turn)
    return TurnSpan(start=start, length=len(turn.token_ids), inexact=inexact, sampling=sampling, **made)
