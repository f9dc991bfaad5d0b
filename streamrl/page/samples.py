"""Batches and samples for the page, fetched from the log when somebody looks at them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.training.spilled_drops import whole
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError, LogTruncated, NotFound, SchemaError
from streamrl.page.index import LEDGER_TABLE, Index
from streamrl.page.log import RunLog
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.dead import DeadRecord
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.ledger import Drop, LedgerEntry
from streamrl.schemas.samples import Sample
from streamrl.schemas.subjects import DEAD, LEDGER, SAMPLES

MOST_TOKENS = 4096
"""Of one sample that are sent; the page says when there are more."""
MOST_MESSAGES = 256
"""Messages of a batch that are read for its samples."""
MOST_DROPS = 500
_ENTRIES = 20
_LETTERS = 200
_PATIENCE_S = 10.0
_CHARS = 2000


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A sample in a list."""

    task: int
    rollout: int
    sample: int
    sequence: int
    reward: float | None
    status: str
    finish_reason: str
    num_tokens: int
    num_trained: int
    first_version: str
    last_version: str
    engine: str
    times: dict[str, float]
    """Unix seconds of what happened to it, as far as is known: claimed, started, finished, scored."""
    turns: tuple[tuple[float, float, float], ...]
    """Asked, begun, finished."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger entry and the samples of its groups."""

    version: str
    time_s: float
    digest: str
    source: str
    num_groups: int
    samples: list[Line]
    missing: int
    """Messages that the stream has no more, or that were too many to be read."""
    drops: list[dict[str, Any]]


class Samples:
    """What the page shows of single batches and samples.

    Args:
        run: its directory.
        config: of the run.
        index: knows where each ledger entry is.
        log: read.
    """

    def __init__(self, run: RunDir, config: Config, index: Index, log: RunLog) -> None:
        self._run = run
        self._config = config
        self._index = index
        self._log = log

    async def batch(self, number: int) -> Batch:
        """The batch that made version `number`; raises NotFound, BusError."""
        bus = await self._log.bus()
        entry = await self._entry(bus, number)
        sequences = list(dict.fromkeys(sequence for group in entry.used for sequence in group.sequences))
        used = {
            (group.task, rollout, sequence)
            for group in entry.used
            for rollout, sequence in zip(group.rollouts, group.sequences, strict=True)
        }
        found, missing = await self._messages(bus, sequences[:MOST_MESSAGES])
        lines = [_line(one, sequence) for sequence, one in found if (one.task, one.rollout, sequence) in used]
        entry = await whole(bus.blobs, entry)
        return Batch(
            version=str(entry.version),
            time_s=entry.time_s,
            digest=entry.digest,
            source=entry.source,
            num_groups=len(entry.used),
            samples=lines,
            missing=missing + max(0, len(sequences) - MOST_MESSAGES),
            drops=[_drop(drop, str(entry.version)) for drop in entry.drops[:MOST_DROPS]],
        )

    async def group(self, number: int, task: int) -> list[dict[str, Any]]:
        """The samples of one task of a batch, token by token; raises NotFound, BusError."""
        bus = await self._log.bus()
        entry = await self._entry(bus, number)
        group = next((one for one in entry.used if one.task == task), None)
        if group is None:
            raise NotFound(f"expected a task of the batch of version {entry.version}, got {task}")
        wanted = set(zip(group.rollouts, group.sequences, strict=True))
        found, _ = await self._messages(bus, list(dict.fromkeys(group.sequences)))
        samples = [(sequence, one) for sequence, one in found if (one.rollout, sequence) in wanted and one.task == task]
        return await asyncio.to_thread(lambda: [self._whole(one, sequence) for sequence, one in samples])

    async def drops(self) -> list[dict[str, Any]]:
        """What was dropped with the newest batches, the newest first."""
        bus = await self._log.bus()
        sequences = self._index.columns(LEDGER_TABLE, ["sequence"], last=_ENTRIES)["sequence"]
        found: list[dict[str, Any]] = []
        for sequence in reversed(sequences.tolist()):
            entry = await whole(bus.blobs, await _fetched(bus, int(sequence)))
            found += [_drop(drop, str(entry.version)) for drop in reversed(entry.drops)]
            if len(found) >= MOST_DROPS:
                break
        return found[:MOST_DROPS]

    async def letters(self) -> list[dict[str, Any]]:
        """The newest dead letters, the newest first."""
        bus = await self._log.bus()
        state = await bus.state(DEAD)
        after = max(state.first - 1, state.last - _LETTERS)
        found: list[dict[str, Any]] = []
        # A last one that somebody has removed never comes.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PATIENCE_S):
                while after < state.last:
                    try:
                        async for message in bus.read(DEAD, after=after):
                            after = message.sequence
                            found.append(_letter(message.body))
                            if after >= state.last:
                                break
                    except LogTruncated:
                        after = max(after, (await bus.state(DEAD)).first - 1)
        return found[::-1]

    async def _entry(self, bus: Bus, number: int) -> LedgerEntry:
        known = self._index.columns(LEDGER_TABLE, ["version", "sequence"])
        at = int(np.searchsorted(known["version"], number))
        if at >= len(known["version"]) or known["version"][at] != number:
            raise NotFound(f"expected the number of a version that was trained, got {number}", hint="it may not be in the index yet")
        return await _fetched(bus, int(known["sequence"][at]))

    async def _messages(self, bus: Bus, sequences: Iterable[int]) -> tuple[list[tuple[int, Sample]], int]:
        found: list[tuple[int, Sample]] = []
        missing = 0
        for sequence in sequences:
            try:
                body = (await bus.fetch(SAMPLES, sequence)).body
                rows = await asyncio.to_thread(lambda body=body, at=sequence: decode_samples(body, where=f"samples {at}").rows())
                found += [(sequence, row) for row in rows]
            except (NotFound, SchemaError):
                missing += 1
        return found, missing

    def _whole(self, one: Sample, sequence: int) -> dict[str, Any]:
        count = min(len(one.tokens), MOST_TOKENS)
        ids = one.tokens[:count].tolist()
        versions = [None if span.version is None else str(span.version) for span in one.spans for _ in range(span.length)][:count]
        prompt = int(np.argmax([version is not None for version in versions])) if any(versions) else count
        return {
            **msgspec.to_builtins(_line(one, sequence)),
            "prompt": self._text(ids[:prompt]),
            "answer": self._text(ids[prompt:]),
            "label": None if one.label is None else str(one.label)[:_CHARS],
            "reward_parts": one.reward_parts,
            "producer": one.producer,
            "tokens": [self._text([id]) for id in ids],
            "ids": ids,
            "versions": versions,
            "mask": one.loss_mask[:count].tolist(),
            "logprobs": [round(value, 4) for value in one.logprobs[:count].tolist()],
        }

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return load_tokenizer(self._run.policy_dir(self._config))
        except ConfigError:
            return None

    def _text(self, ids: list[int]) -> str:
        return " ".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.decode(ids)


async def _fetched(bus: Bus, sequence: int) -> LedgerEntry:
    return decode((await bus.fetch(LEDGER, sequence)).body, LedgerEntry, where=f"{LEDGER} {sequence}")


def _line(one: Sample, sequence: int) -> Line:
    versions = [str(span.version) for span in one.spans if span.version is not None]
    times = {"claimed": one.claimed_s, "started": one.started_s, "finished": one.finished_s, "scored": one.scored_s}
    return Line(
        task=one.task,
        rollout=one.rollout,
        sample=one.sample,
        sequence=sequence,
        reward=one.reward,
        status=one.status.value,
        finish_reason=one.finish_reason,
        num_tokens=len(one.tokens),
        num_trained=int(one.loss_mask.sum()),
        first_version=versions[0] if versions else "",
        last_version=versions[-1] if versions else "",
        engine=one.engine,
        times={name: time_s for name, time_s in times.items() if time_s},
        turns=tuple((turn.asked_s, turn.began_s, turn.finished_s) for turn in one.turns if turn.finished_s),
    )


def _drop(drop: Drop, version: str) -> dict[str, Any]:
    return {
        "version": version,
        "sequence": drop.sequence,
        "task": drop.task,
        "rollouts": list(drop.rollouts),
        "reason": drop.reason,
        "detail": drop.detail[:_CHARS],
    }


def _letter(body: bytes) -> dict[str, Any]:
    try:
        letter = decode(body, DeadRecord, where=DEAD)
    except SchemaError as error:
        return {"sequence": 0, "subject": "", "reason": error.message, "task": None, "num_bytes": len(body), "time_s": 0.0}
    return {
        "sequence": letter.sequence,
        "subject": letter.subject,
        "reason": letter.reason[:_CHARS],
        "task": letter.task,
        "num_bytes": len(letter.body) if letter.num_bytes is None else letter.num_bytes,
        "time_s": letter.time_s,
    }
