"""Stored samples asked again: their reward, in a child as producers run it, and their prompt, at a live engine of a run that is up."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import msgspec
from msgspec.structs import replace

from streamrl.bus.reading import read_key
from streamrl.config.bridges import with_options
from streamrl.config.data import has_images
from streamrl.config.tree import Config, RewardConfig
from streamrl.data.mixed import MixedRows
from streamrl.data.problems import WITH_IMAGES, Problem, TaskRows, Unusable
from streamrl.data.streamed import open_task_rows
from streamrl.data.tokenizer import Tokenizer
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.protocol import GenerateRequest
from streamrl.errors import ConfigError, DataError, EngineError
from streamrl.history.source import Source
from streamrl.history.trace import printable
from streamrl.producers.chat_format import ChatFormat, opens_thought
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Scoring
from streamrl.producers.children.jobs import NOTHING, job
from streamrl.producers.children.pool import Children
from streamrl.producers.completions import complete
from streamrl.producers.engine_pool import EnginePool
from streamrl.producers.episode import Episode, Segment
from streamrl.producers.feeder import plan_tasks
from streamrl.producers.mixture import first_segments
from streamrl.producers.protocol import Failure
from streamrl.rewards.factory import LATE, make_reward, runs_in_children
from streamrl.rewards.layers import close
from streamrl.rewards.protocol import RewardValue
from streamrl.runtime.kinds import take_environment
from streamrl.schemas.control import ROLLOUT_ROLE, Grant, MixtureRecord
from streamrl.schemas.samples import Sample, VersionSpan
from streamrl.schemas.subjects import KEY_GRANTED, KEY_MIXTURE
from streamrl.schemas.tasks import RolloutTask

_TAKEN = 1024
"""Rows of a search that are read at a time; WITH_IMAGES where they have images."""


class Again(msgspec.Struct, frozen=True, kw_only=True):
    """One sample's reward, as stored and as it is now."""

    rollout: int
    sample: int
    stored: float | None
    stored_parts: dict[str, float]
    now: float | None
    now_parts: dict[str, float]
    error: str
    """Why it has none now."""


def reward_config(config: Config, reference: str) -> RewardConfig:
    """The run's reward, or the user's function `reference` with no options.

    Raises:
        ConfigError: the run's rewards come late, by somebody else's hand.
    """
    if reference:
        place, colon, name = reference.partition(":")
        path = str(Path(place).expanduser().absolute()) + colon + name if place.endswith(".py") else reference
        return replace(config.reward, kind=path, options={}, key="")
    if config.reward.kind != LATE:
        return config.reward
    raise ConfigError(
        "expected a reward that this run computes itself, got reward.kind = 'late': somebody else gives its rewards",
        hint="name a function: --reward file.py:name",
        key="reward.kind",
    )


async def task_of_samples(source: Source, samples: Sequence[Sample], tokenizer: Tokenizer) -> tuple[RolloutTask, str]:
    """The task that gave these samples, and what could not be found of it, in words.

    It is planned again from the run's data. Where these are gone or others than they were, it has what the samples have.
    """
    first = samples[0]
    prompt_ids = tuple(first.tokens[: _prompt_length(first)].tolist())
    made = RolloutTask(
        run=first.run,
        index=first.task,
        source=first.source,
        policy=first.policy,
        data_epoch=first.data_epoch,
        prompt_ids=prompt_ids,
        prompt=tokenizer.decode(prompt_ids),
        label=first.label,
        metadata=first.metadata,
        num_rollouts=first.group_size,
        sampling=first.sampling,
        seed=first.seed,
        image_rows=first.image_rows or msgspec.UNSET,
    )
    lacks = "the task has what its samples have (its prompt as text, no tools)"
    try:
        with tempfile.TemporaryDirectory() as kept:
            problems = open_task_rows(source.config, tokenizer, Path(kept))
    except (DataError, ConfigError) as error:
        return made, f"{lacks}: {error.message}"
    grant = await read_key(source.bus.kv, KEY_GRANTED, Grant) if source.bus is not None else None
    warmup_end = grant.warmup_end if grant is not None else 0
    if isinstance(problems, MixedRows):
        known = await read_key(source.bus.kv, KEY_MIXTURE, MixtureRecord) if source.bus is not None else None
        segments = known.segments if known is not None else ()
        problems = MixedRows(problems.names, problems.sets, segments or first_segments(source.config))
    [planned] = plan_tasks(Grant(first.task + 1, 0, 0, warmup_end), first.task, first.task + 1, problems, source.config)
    if (planned.prompt_ids, planned.label, planned.source, planned.images) == (prompt_ids, first.label, first.source, first.image_rows):
        return replace(planned, num_rollouts=first.group_size), ""
    # Where the warm-up ended is not in a recording; and the order of the rows may be another one now.
    same = _row_of(problems, first, prompt_ids, WITH_IMAGES if has_images(source.config.data) else _TAKEN)
    if same is None:
        return made, f"{lacks}: no row of {source.config.data.train} is it"
    return replace(made, row=same.row, prompt=same.prompt, tools=same.tools, metadata=same.metadata, reward=same.reward), ""


def _row_of(problems: TaskRows | MixedRows, sample: Sample, prompt_ids: Sequence[int], at_once: int) -> Problem | None:
    """The first row with this prompt and a sample's label and images."""
    for start in range(0, len(problems), at_once):
        for one in problems.take(range(start, min(start + at_once, len(problems)))):
            if not isinstance(one, Problem) or tuple(each.image for each in one.images) != sample.image_rows:
                continue
            if (one.prompt_ids, one.label) == (prompt_ids, sample.label):
                return one
    return None


def _text(ids: Sequence[int], stops: Container[int], texts: Sequence[str], tokenizer: Tokenizer) -> str:
    """A turn's text: without its stop token, up to the first of the sample's stop strings."""
    text = tokenizer.decode(ids[:-1] if ids[-1] in stops else ids)
    return text[: min((at for stop in texts if (at := text.find(stop)) >= 0), default=len(text))]


def episode_of(sample: Sample, task: RolloutTask, tokenizer: Tokenizer) -> Episode:
    """The episode as its reward saw it, without a reward."""
    stops = {*tokenizer.stop_ids, *sample.sampling.stop_token_ids}
    segments: list[Segment] = []
    place = 0
    for span in sample.spans:
        ids = sample.tokens[place : place + span.length].tolist()
        logprobs = sample.logprobs[place : place + span.length].tolist()
        starts_turn = any(turn.start == place for turn in sample.turns)
        place += span.length
        if span.version is None:
            segments.append(Segment(ids))
        elif segments and segments[-1].is_model and not starts_turn:
            last = segments[-1]
            spans = (*last.spans, VersionSpan(span.length, span.version))
            segments[-1] = Segment([*last.token_ids, *ids], [*last.logprobs, *logprobs], spans)
        else:
            segments.append(Segment(ids, logprobs, (VersionSpan(span.length, span.version),)))
    turns = [list(segment.token_ids) for segment in segments if segment.is_model]
    found = Episode(
        segments=tuple(segments),
        finish_reason=sample.finish_reason,
        status=sample.status,
        turns=tuple(_text(ids, stops, sample.sampling.stop, tokenizer) for ids in turns),
        sampling=sample.sampling,
        logprob_mode=sample.logprob_mode,
        seed=sample.seed,
        engine=sample.engine,
        rollout=sample.rollout,
        agent=sample.agent,
        metadata={name: value for name, value in sample.metadata.items() if task.metadata.get(name) != value},
        started_s=sample.started_s,
        finished_s=sample.finished_s,
    )
    found.thinking = opens_thought(tokenizer, found.asked_ids)
    return found


def _prompt_length(sample: Sample) -> int:
    return sample.spans[0].length if sample.spans and sample.spans[0].version is None else 0


async def score_again(
    source: Source, reward: RewardConfig, samples: Sequence[Sample], task: RolloutTask, tokenizer: Tokenizer, *, by_row: bool
) -> list[Again]:
    """The rewards of a task's samples, computed once more; user code runs in a process of its own, under the limits of a producer's.

    Args:
        source: of the samples.
        reward: what is asked.
        samples: of the task.
        task: theirs.
        tokenizer: of the policy.
        by_row: `reward` is the run's, in whose place a row may name its own (`data.reward_key`).

    Raises:
        ConfigError: the reward cannot be loaded.
    """
    episodes = [episode_of(sample, task, tokenizer) for sample in samples]
    rows = source.config.data.reward_options if by_row and source.config.data.reward_key else None
    if runs_in_children(reward, by_row=rows is not None):
        values = await _in_child(source, reward, rows, task, episodes)
    else:
        made = make_reward(reward)
        try:
            values = await made.score(task, episodes) if made is not None else []
        finally:
            await close(made)
    if isinstance(values, Failure):
        values = [ConfigError(values.detail)] * len(episodes)
    return [_again(sample, value) for sample, value in zip(samples, values, strict=True)]


async def _in_child(
    source: Source, reward: RewardConfig, rows: dict[str, dict[str, Any]] | None, task: RolloutTask, episodes: Sequence[Episode]
) -> Sequence[RewardValue | Exception] | Failure:
    config = source.config
    take_environment(config, "producer")
    hello = Hello(
        reward=reward.kind,
        reward_options=with_options(config, source.model_dir, reward.kind, reward.options),
        reward_key=reward.key,
        by_row=rows,
        model_dir=str(source.model_dir),
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
        memory_bytes=config.producer.child_memory_bytes,
    )
    limits = Limits(idle_s=config.producer.idle_timeout_s, total_s=config.producer.rollout_timeout_s)
    children = Children(hello, limits, count=1, scoring=Scoring.of(reward))
    try:
        await children.start()
        # A reward asks no engine.
        async with job(children, task, engine=cast(Any, None), keeping=NOTHING, max_deaths=1) as found:
            return await found.score(episodes)
    finally:
        await children.close()


def _again(sample: Sample, value: RewardValue | Exception) -> Again:
    failed = isinstance(value, Exception)
    return Again(
        rollout=sample.rollout,
        sample=sample.sample,
        stored=sample.trained_reward,
        stored_parts=sample.reward_parts,
        now=None if failed else value.value,
        now_parts={} if failed else value.parts,
        error=(str(value) or type(value).__name__) if failed else "",
    )


def reward_text(task: int, reward: str, found: Sequence[Again], note: str) -> str:
    """Both values of each sample, side by side."""
    lines = [f"task {task}, scored again by {reward}", "", f"{'ROLLOUT':>7}  {'STORED':>10}  {'NOW':>10}"]
    for one in found:
        stored, now = ("-" if value is None else f"{value:.6g}" for value in (one.stored, one.now))
        told = one.error or ("" if one.stored == one.now else "differs")
        place = f"{one.rollout}.{one.sample}" if one.sample else str(one.rollout)
        lines.append(f"{place:>7}  {stored:>10}  {now:>10}  {printable(told)}".rstrip())
        names = [name for name in {**one.stored_parts, **one.now_parts} if one.stored_parts.get(name) != one.now_parts.get(name)]
        if one.now is not None:
            lines += [f"{'':9}{printable(name)}: {one.stored_parts.get(name, '-')} -> {one.now_parts.get(name, '-')}" for name in names]
    return "\n".join([*lines, *(["", f"note: {note}"] if note else [])])


FIND_S = 10.0
"""How long a live engine is looked for."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine gave for a prompt."""

    prompt: str
    prompt_tokens: int
    answer: str
    tokens: tuple[int, ...]
    logprob_sum: float
    """Natural log of the probability that this answer was drawn with."""
    versions: dict[str, int]
    """Tokens by the version that sampled them."""
    finish_reason: str
    engine: str
    took_s: float


def prompt_ids(source: Source, tokenizer: Tokenizer, text: str | None, row: int | None) -> Sequence[int]:
    """The tokens of a text, or of a row of the run's data (numbered as its tasks number them).

    Raises:
        ConfigError: there is no such row, or the text has no token.
        DataError: the data cannot be read, or the row cannot be used.
    """
    config = source.config
    if row is not None:
        with tempfile.TemporaryDirectory() as kept:
            problems = open_task_rows(config, tokenizer, Path(kept))
        if not 0 <= row < len(problems):
            raise ConfigError(f"expected --row from 0 to {len(problems) - 1} of {config.data.train}, got {row}", hint="count from 0")
        [found] = problems.take([row])
        if isinstance(found, Unusable):
            raise DataError(found.detail, hint="name another row", row=row)
        return found.prompt_ids
    found = ChatFormat(tokenizer, chat_template=config.data.chat_template).text_prompt(text or "")
    if not found:
        raise ConfigError("expected a prompt of at least one token, got none", hint="write --prompt 'some text'")
    return found


async def ask(source: Source, tokenizer: Tokenizer, ids: Sequence[int], *, seed: int) -> Answer:
    """One completion with the run's sampling.

    Raises:
        ConfigError: it is a recording; the engines' token cannot be read.
        EngineError: no engine is there, or it refuses.
    """
    if source.bus is None or source.run is None:
        raise ConfigError("expected a run that is up, got a recording, which has no engines", hint="name the run")
    token = source.run.engine_token()
    pool = EnginePool(source.bus.kv, lambda presence: ChannelEngine(presence.address, token=token), role=ROLLOUT_ROLE)
    request = GenerateRequest(request_id=f"inspect-{uuid4().hex}", prompt_ids=tuple(ids), sampling=source.config.sampling, seeds=(seed,))
    following = asyncio.create_task(pool.run())
    try:
        began = time.monotonic()
        while not any(presence.serving is not None for presence in pool.engines.values()):
            if time.monotonic() - began > FIND_S:
                raise EngineError(
                    f"expected an engine of run {source.run.name!r} that serves a version, found none within {FIND_S:g} s",
                    hint=f"`streamrl status {source.run.name}` says what its engines do",
                )
            await asyncio.sleep(0.05)
        began = time.monotonic()
        [found] = await complete(pool, request)
        took_s = time.monotonic() - began
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
    versions: dict[str, int] = {}
    for span in found.segment.spans:
        versions[str(span.version)] = versions.get(str(span.version), 0) + span.length
    return Answer(
        prompt=tokenizer.decode(ids),
        prompt_tokens=len(ids),
        answer=found.text(tokenizer),
        tokens=tuple(found.token_ids),
        logprob_sum=float(sum(found.segment.logprobs)),
        versions=versions,
        finish_reason=found.finish_reason,
        engine=found.engine,
        took_s=took_s,
    )


def answer_text(found: Answer) -> str:
    """The answer, and under it what is known of it."""
    versions = ", ".join(f"{count} of version {version}" for version, count in found.versions.items())
    return "\n".join(
        [
            printable(found.answer, lines=True),
            "",
            f"{len(found.tokens)} tokens ({versions or 'none'}), {found.finish_reason}, log-prob {found.logprob_sum:.4f}",
            f"by {found.engine} in {found.took_s:.3f} s, for a prompt of {found.prompt_tokens} tokens",
        ]
    )
