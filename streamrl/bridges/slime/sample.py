"""`Sample` as slime's hooks know it, and the way from our episodes to it and back.

```text
tokens             p p p p | m m m | t t | m m        an episode's segments: prompt, model, tool, model
response_length              <------ 7 ------->
loss_mask                    1 1 1   0 0   1 1
rollout_log_probs            . . .   0 0   . .
```

On the way back the tokens of the model are looked up among what engines gave in this rollout: a hook cannot make any up.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.completions import Completion
from streamrl.producers.episode import Episode, Segment
from streamrl.schemas.samples import Status, VersionSpan
from streamrl.schemas.tasks import RolloutTask

ATTRIBUTES = "slime_attributes"
"""In an episode's metadata: attributes that a hook has made up, which go with the sample to its reward and its filters."""
_UNREAD = ("multimodal_inputs", "multimodal_train_inputs", "teacher_log_probs", "mopd_teacher_log_probs", "train_metadata",
           "generate_function_path", "custom_rm_path")  # fmt: skip
"""Fields of slime's samples that would change what it trains, and that nothing here reads."""


class SampleStatus(enum.Enum):
    """How a sample ended."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One token sequence with slime's names for its parts; `R` = response_length."""

    group_index: int | None = None
    """The task's index."""
    index: int | None = None
    """group_index * rollouts of a group + rollout."""
    prompt: Any = ""
    """Text, with the chat template applied where `data.chat_template` is on."""
    tokens: list[int] = field(default_factory=list)
    """Of prompt and response; empty before anything was generated."""
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    loss_mask: list[int] | None = None
    """[R]; None: all ones."""
    rollout_log_probs: list[float] | None = None
    """[R]; 0.0 where no model sampled the token."""
    weight_versions: list[str] = field(default_factory=list)
    """Version numbers that sampled it, each once, in their order."""
    remove_sample: bool = False
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    """The row's, and what hooks have added."""
    multimodal_inputs: None = None
    session_id: str | None = None

    Status = SampleStatus

    @property
    def effective_response_length(self) -> int:
        """Trained tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or of a table the part that `args.reward_key` names."""
        return self.reward[args.reward_key] if args.reward_key and isinstance(self.reward, Mapping) else self.reward

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int] | None = None,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Put tokens behind the response, masks and log-probs with them; of a model's, `meta_info` gives version and status.

        The lists grow in place, as in slime, where hooks keep hold of them. Without `update_terminal_info` the status stays.
        """
        ids = [int(token) for token in tokens or ()]
        given = [0.0] * len(ids) if log_probs is None else list(log_probs)
        if len(given) != len(ids):
            raise ValueError(f"expected a log-prob for each of {len(ids)} tokens, got {len(given)}")
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * self.response_length
        self.loss_mask += [int(trainable)] * len(ids)
        self.rollout_log_probs += given
        self.tokens += ids
        self.response += text or ""
        self.response_length += len(ids)
        if meta_info is not None:
            before = self.status
            self.update_from_meta_info(args, meta_info)
            self.status = self.status if update_terminal_info else before

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Version and status of an engine's answer."""
        if (version := meta_info.get("weight_version")) is not None:
            self.weight_versions.append(version)
        ends = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED, "abort": SampleStatus.ABORTED}
        self.status = ends[meta_info["finish_reason"]["type"]]


class Asked(Protocol):
    """One request of a rollout that has been answered."""

    @property
    def prompt_ids(self) -> Sequence[int]: ...

    @property
    def completion(self) -> Completion: ...


def blank(task: RolloutTask, rollout: int, prompt: str) -> Sample:
    """A rollout's sample before anything was generated."""
    return Sample(
        group_index=task.index,
        index=task.index * task.num_rollouts + rollout,
        prompt=prompt,
        label=copy.deepcopy(task.label),
        metadata=copy.deepcopy(task.metadata),
        session_id=f"{task.index}.{rollout}",
    )


def sample_of(task: RolloutTask, episode: Any, prompt: Any, *, parts: bool = False) -> Sample:
    """A sample of an episode (`streamrl.producers.episode.Episode`), with its reward if it has one by now, or with `parts` those."""
    head, *rest = episode.segments
    numbers = [span.version.number for segment in rest for span in segment.spans if span.version is not None]
    found = blank(task, episode.rollout, prompt)
    found.tokens = [token for segment in episode.segments for token in segment.token_ids]
    found.response = episode.turns[0] if len(episode.turns) == 1 else "".join(episode.turns)
    found.response_length = len(found.tokens) - len(head.token_ids)
    found.loss_mask = [int(segment.is_model) for segment in rest for _ in segment.token_ids]
    found.rollout_log_probs = [value for segment in rest for value in segment.logprobs or [0.0] * len(segment.token_ids)]
    found.weight_versions = [str(number) for number in dict.fromkeys(numbers)]
    found.reward = dict(episode.reward_parts) if parts and episode.reward_parts else episode.reward
    found.status = SampleStatus(episode.status.value)
    found.metadata |= copy.deepcopy(episode.metadata)
    for name, value in found.metadata.pop(ATTRIBUTES, {}).items():
        setattr(found, name, value)
    return found


def episode_of(sample: Any, task: RolloutTask, rollout: int, asked: Sequence[Asked], *, seed: int) -> Episode:
    """The episode that a sample is.

    Args:
        sample: `Sample`, or slime's own, as a hook has left it.
        task: whose rollout it is.
        rollout: index within the group.
        asked: what engines were asked and gave in this rollout.
        seed: of the rollout.

    Raises:
        SchemaError: fields that do not fit each other, a trained token that no engine gave behind these tokens, a status that is no end.
    """
    tokens, mask = _checked(sample)
    start = len(tokens) - len(mask)
    places, last = _sampled(tokens, asked)
    segments = [Segment(tuple(tokens[:start]))]
    for begin, end, turn in _runs(mask, places, start):
        segments.append(Segment(tuple(tokens[begin:end])) if turn is None else _part(asked[turn], begin, end))
    completion = asked[last].completion
    status = _status(sample, completion.finish_reason)
    return Episode(
        segments=tuple(segments),
        finish_reason={Status.COMPLETED: "stop", Status.TRUNCATED: "length"}.get(status, completion.finish_reason),
        status=status,
        turns=(str(sample.response),),
        sampling=task.sampling,
        logprob_mode=completion.logprob_mode,
        seed=seed,
        engine=completion.engine,
        rollout=rollout,
        reward=_reward(sample),
        metadata={name: value for name, value in dict(sample.metadata).items() if task.metadata.get(name) != value} | _own(sample),
    )


def _own(sample: Any) -> dict[str, dict[str, Any]]:
    """Attributes that are no fields."""
    fields = getattr(sample, "__dataclass_fields__", {})
    own = {name: value for name, value in vars(sample).items() if name not in fields and value is not None}
    for name, value in own.items():
        try:
            msgspec.json.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise SchemaError(
                f"sample.{name} cannot be kept for its reward, which another process computes: {error}",
                hint="set it to plain numbers, texts, lists and tables, or back to None",
            ) from error
    return {ATTRIBUTES: own} if own else {}


def _checked(sample: Any) -> tuple[list[int], list[int]]:
    """Tokens, and [R] the loss mask of the response."""
    if unread := next((name for name in _UNREAD if getattr(sample, name, None) is not None), ""):
        raise SchemaError(f"the sample came back with {unread}, which nothing here reads", hint="leave it None")
    tokens, length = [int(token) for token in sample.tokens], int(sample.response_length)
    if not 0 < length < len(tokens):
        raise SchemaError(
            f"expected tokens of a prompt and a response, got {len(tokens)} tokens and response_length = {length}",
            hint="set sample.tokens to the ids of prompt and response together, and response_length to those of the response",
        )
    mask = [1] * length if sample.loss_mask is None else [int(one) for one in sample.loss_mask]
    if len(mask) != length or not set(mask) <= {0, 1}:
        raise SchemaError(
            f"expected a loss_mask of {length} zeros and ones, as response_length says, got {len(mask)} values {sorted(set(mask))[:4]}"
        )
    if not any(mask):
        raise SchemaError(
            "the sample's loss_mask is 0 everywhere, so there is nothing to train on", hint="set remove_sample to leave it out"
        )
    return tokens, mask


def _sampled(tokens: Sequence[int], asked: Sequence[Asked]) -> tuple[dict[int, int], int]:
    """By place in the sequence: which request gave the token; and the last request that gave one.

    A request counts where the sequence begins with what it was asked, and for as many tokens as the sequence has of its answer. Of several
    that gave a token, as where one of many answers was chosen, it is the one whose answer the sequence follows furthest, then the newest.
    """
    found: list[tuple[int, int, int]] = []  # end, request, start: tokens start to end are its own
    for number, one in enumerate(asked):
        start = end = len(one.prompt_ids)
        if list(one.prompt_ids) != list(tokens[:start]):
            continue
        for token in one.completion.token_ids:
            if end >= len(tokens) or tokens[end] != token:
                break
            end += 1
        if end > start:
            found.append((end, number, start))
    found.sort()
    places = {place: number for end, number, start in found for place in range(start, end)}
    return places, found[-1][1] if found else -1


def _runs(mask: Sequence[int], places: Mapping[int, int], start: int) -> list[tuple[int, int, int | None]]:
    """The response in pieces (begin, end, request), which is None where tokens are not trained."""
    found: list[tuple[int, int, int | None]] = []
    for at, trained in enumerate(mask, start):
        turn = places.get(at) if trained else None
        if trained and turn is None:
            raise SchemaError(
                f"token {at - start} of the response has loss mask 1, but no engine gave it behind the tokens before it",
                hint="send the ids so far as input_ids and append output_token_logprobs as they come; mask what you add yourself with 0",
            )
        if found and found[-1][2] == turn:
            found[-1] = (found[-1][0], at + 1, turn)
        else:
            found.append((at, at + 1, turn))
    return found


def _part(one: Asked, begin: int, end: int) -> Segment:
    """Tokens `begin` to `end` of the sequence, as the request that gave them did."""
    segment, first = one.completion.segment, len(one.prompt_ids)
    low, high = begin - first, end - first
    if (low, high) == (0, len(segment.token_ids)):
        return segment
    spans: list[VersionSpan] = []
    stop = 0
    for span in segment.spans:
        start, stop = stop, stop + span.length
        if (length := min(stop, high) - max(start, low)) > 0:
            spans.append(VersionSpan(length, span.version))
    return Segment(
        tuple(segment.token_ids[low:high]),
        tuple(segment.logprobs[low:high]),
        tuple(spans),
        segment.inexact,
        segment.temperature,
        segment.origin,
        None,
        segment.sampling,
    )


def _status(sample: Any, ended: str) -> Status:
    said = getattr(sample.status, "value", sample.status)
    if said == SampleStatus.PENDING.value:
        return Status.TRUNCATED if ended == "length" else Status.COMPLETED
    if said == SampleStatus.ABORTED.value:
        raise SchemaError(
            "the sample came back ABORTED: there is no buffer that it could go back to", hint="raise, or return what is whole"
        )
    try:
        return Status(said)
    except ValueError as error:
        raise SchemaError(f"expected a Sample.Status, got {sample.status!r}") from error


def _reward(sample: Any) -> float | None:
    """A number that a hook has set; a table is for the run's reward, which knows the part that is meant."""
    if isinstance(sample.reward, Mapping):
        raise SchemaError(
            "the sample came back with a table as its reward, of which no part is the reward here",
            hint="set sample.reward to a number, or leave the table to custom_rm_path, whose part reward.key names",
        )
    if isinstance(sample.reward, str):
        raise SchemaError(
            f"expected a number as the sample's reward, got the text {sample.reward!r}", hint="set sample.reward = float(...)"
        )
    return None if sample.reward is None else float(sample.reward)
