"""Batches and samples for the page, fetched from the log when somebody looks at them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.consumers.training.spilled_drops import whole
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import ConfigError, LogTruncated, NotFound, SchemaError
from streamrl.history.inspect_samples import versions_of
from streamrl.page.branch import entry_at
from streamrl.page.conversation import Marks, conversation, marks_of
from streamrl.page.index import LEDGER_TABLE, Index
from streamrl.page.log import RunLog
from streamrl.page.search import BASELINE, MOST_HITS, TRAINED, Ends, Found, Hit, Line, Wanted, around, turns_of
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
MOST_SIDES = 32
"""Samples of one task that are sent token by token."""
MOST_SEARCHED = 65_536
"""Tokens of one sample in which a text is looked for."""
MOST_PARTS = 256
"""Messages of one conversation, and parts of one reward, that are sent."""
MOST_DROPS = 500
_NAME_CHARS = 200
_SEARCH_S = 3.0
_EXCERPT = 64
_ENTRIES = 20
_LETTERS = 200
_PATIENCE_S = 10.0
_CHARS = 2000


WEIGHTS = (
    *("train/tis", "train/tis_abs", "train/tis_clipfrac"),
    *("train/train_rollout_logprob_abs_diff", "train/train_rollout_logprob_abs_diff_max", "train/ppo_kl"),
)
"""What a batch's ledger entry says of its importance weights; those of single tokens are kept of the newest batches only."""


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


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one task."""

    samples: list[dict[str, Any]]
    more: int
    """Samples beside them that are not sent."""
    weights: dict[str, float]
    """Of the batch as a whole."""


class Samples:
    """What the page shows of single batches and samples.

    Args:
        run: its directory.
        config: of the run.
        index: knows where each ledger entry is.
        log: read; of a branch its parent's.
    """

    def __init__(self, run: RunDir, config: Config, index: Index, log: RunLog) -> None:
        self._run = run
        self._config = config
        self._index = index
        self._log = log

    async def batch(self, number: int) -> Batch:
        """The batch that made version `number`; raises NotFound, BusError."""
        bus = await self._log.bus()
        entry = await self.entry(bus, number)
        ends = Ends(entry)
        found, missing = await self.messages(bus, ends.sequences()[:MOST_MESSAGES])
        found = [(one, sequence, ends.of(one, sequence)) for sequence, one in found]
        lines = [_line(*one, entry) for one in found if one[2] in (TRAINED, BASELINE)]
        entry = await whole(bus.blobs, entry)
        return Batch(
            version=str(entry.version),
            time_s=entry.time_s,
            digest=entry.digest,
            source=entry.source,
            num_groups=len(entry.used),
            samples=lines,
            missing=missing + max(0, len(ends.sequences()) - MOST_MESSAGES),
            drops=[_drop(drop, str(entry.version)) for drop in entry.drops[:MOST_DROPS]],
        )

    async def group(self, number: int, task: int) -> Group:
        """The samples of one task of a batch, or dropped before it, token by token; raises NotFound, BusError."""
        bus = await self._log.bus()
        entry = await whole(bus.blobs, await self.entry(bus, number))
        ends = Ends(entry, task=task)
        if not ends.sequences():
            raise NotFound(f"expected a task of the batch of version {entry.version}, got {task}")
        found, _ = await self.messages(bus, ends.sequences()[:MOST_MESSAGES])
        samples = [(one, sequence, end) for sequence, one in found if one.task == task and (end := ends.of(one, sequence))]
        return Group(
            samples=await asyncio.to_thread(lambda: self._sides(samples[:MOST_SIDES], entry)),
            more=max(0, len(samples) - MOST_SIDES),
            weights={name: entry.metrics[name] for name in WEIGHTS if name in entry.metrics},
        )

    async def search(self, wanted: Wanted, *, upto: int | None, batches: int, skip: int = 0) -> Found:
        """Samples of several batches, the newest first.

        Args:
            wanted: which.
            upto: number of the version whose batch is looked at first; None: the newest.
            batches: to look at, at most; fewer where they hold much.
            skip: messages of the first batch that an earlier answer with the same `wanted` has looked at.

        Raises:
            BusError: the log cannot be read.
        """
        bus = await self._log.bus()
        known = self._index.columns(LEDGER_TABLE, ["version", "sequence"])
        end = len(known["version"]) if upto is None else int(np.searchsorted(known["version"], upto, side="right"))
        until_s = time.monotonic() + _SEARCH_S
        lines: list[Hit] = []
        first = begun = ended = num_samples = missing = num_messages = 0
        at = end

        def is_full() -> bool:
            return len(lines) >= MOST_HITS or num_messages >= MOST_MESSAGES or time.monotonic() >= until_s

        while at > 0 and ended < batches and (at == end or not is_full()):
            entry = await self._fetched(bus, int(known["sequence"][at - 1]))
            if wanted.became != TRAINED:
                entry = await whole(bus.blobs, entry)
            ends = Ends(entry, task=wanted.task, became=wanted.became)
            begun += skip == 0
            first = int(known["version"][at - 1])
            for sequence in ends.sequences()[skip:]:
                found, gone = await self.messages(bus, [sequence])
                hits, seen = await asyncio.to_thread(self._hits, wanted, found, ends, entry)
                lines += hits
                num_samples, missing, num_messages, skip = num_samples + seen, missing + gone, num_messages + 1, skip + 1
                if is_full():
                    break
            if skip < len(ends.sequences()):
                break
            at, ended, skip = at - 1, ended + 1, 0
        return Found(
            samples=lines,
            batches=begun,
            num_samples=num_samples,
            missing=missing,
            first=first,
            more=int(known["version"][at - 1]) if at > 0 else None,
            skip=skip,
        )

    def _hits(self, wanted: Wanted, found: Iterable[tuple[int, Sample]], ends: Ends, entry: LedgerEntry) -> tuple[list[Hit], int]:
        """What is wanted of the samples of an entry's messages, and how many were looked at."""
        hits: list[Hit] = []
        count = 0
        for sequence, one in found:
            if not (end := ends.of(one, sequence)):
                continue
            count += 1
            line = _line(one, sequence, end, entry)
            if wanted.takes(line) and (text := self._excerpt(one, wanted.text)) is not None:
                hits.append(Hit(line=line, text=text))
        return hits, count

    def _excerpt(self, one: Sample, text: str) -> str | None:
        """Of a sample's text what stands around `text`, None where it does not; without one, the beginning of what was sampled."""
        if text:
            return around(self._text(one.tokens[:MOST_SEARCHED].tolist()), text)
        start = next((at for at, version in enumerate(versions_of(one)) if version is not None), 0)
        return self._text(one.tokens[start : start + _EXCERPT].tolist())[:_CHARS]

    async def drops(self) -> list[dict[str, Any]]:
        """What was dropped with the newest batches, the newest first."""
        bus = await self._log.bus()
        sequences = self._index.columns(LEDGER_TABLE, ["sequence"], last=_ENTRIES)["sequence"]
        found: list[dict[str, Any]] = []
        for sequence in reversed(sequences.tolist()):
            entry = await whole(bus.blobs, await self._fetched(bus, int(sequence)))
            found += [_drop(drop, str(entry.version)) for drop in reversed(entry.drops)]
            if len(found) >= MOST_DROPS:
                break
        return found[:MOST_DROPS]

    async def letters(self) -> list[dict[str, Any]]:
        """The newest dead letters, the newest first."""
        if self._index.branch is not None:  # its parent's are its parent's
            return []
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

    async def entry(self, bus: Bus, number: int) -> LedgerEntry:
        """What made version `number`; raises NotFound, BusError."""
        known = self._index.columns(LEDGER_TABLE, ["version", "sequence"])
        at = int(np.searchsorted(known["version"], number))
        if at >= len(known["version"]) or known["version"][at] != number:
            raise NotFound(f"expected the number of a version that was trained, got {number}", hint="it may not be in the index yet")
        return await self._fetched(bus, int(known["sequence"][at]))

    async def _fetched(self, bus: Bus, place: int) -> LedgerEntry:
        """The entry of a sequence number, of a branch that at a byte of its ledger."""
        if self._index.branch is not None:
            return await asyncio.to_thread(entry_at, self._run, place)
        return decode((await bus.fetch(LEDGER, place)).body, LedgerEntry, where=f"{LEDGER} {place}")

    async def messages(self, bus: Bus, sequences: Iterable[int]) -> tuple[list[tuple[int, Sample]], int]:
        """Sequence and sample of what is in these messages, and how many are gone or cannot be read."""
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

    def _sides(self, samples: Sequence[tuple[Sample, int, str]], entry: LedgerEntry) -> list[dict[str, Any]]:
        from streamrl.trainers.token_weights import FOLDER, read_token_weights, shown

        kept = read_token_weights(self._run.path / FOLDER, entry.version)
        sides: list[dict[str, Any]] = []
        for one, sequence, became in samples:
            of_rollout = kept.get((one.task, one.rollout), []) if became == TRAINED else []
            values = of_rollout[one.sample] if one.sample < len(of_rollout) else None
            side = self._whole(one, sequence, became, entry)
            if values is not None and len(values.weights) == len(one.tokens):
                count = len(side["tokens"])
                side |= {"weights": list(shown(values.weights[:count])), "trainer_logprobs": list(shown(values.logprobs[:count]))}
                if values.advantages is not None:
                    side |= {"advantages": list(shown(values.advantages[:count])), "advantage": _spread(values.advantages)}
            sides.append(side)
        return sides

    def _whole(self, one: Sample, sequence: int, became: str, entry: LedgerEntry) -> dict[str, Any]:
        count = min(len(one.tokens), MOST_TOKENS)
        ids = one.tokens[:count].tolist()
        versions = versions_of(one)[:count]
        prompt = int(np.argmax([version is not None for version in versions])) if any(versions) else count
        return {
            **msgspec.to_builtins(_line(one, sequence, became, entry)),
            "prompt": self._text(ids[:prompt]),
            "conversation": msgspec.to_builtins(conversation(one, self._text, self._marks)[:MOST_PARTS]),
            "label": None if one.label is None else str(one.label)[:_CHARS],
            "reward_parts": {name[:_NAME_CHARS]: value for name, value in list(one.reward_parts.items())[:MOST_PARTS]},
            "producer": one.producer[:_NAME_CHARS],
            "seed": one.seed,
            "metadata": msgspec.json.encode(one.metadata).decode(errors="replace")[:_CHARS] if one.metadata else "",
            "tokens": [self._text([id]) for id in ids],
            "ids": ids,
            "versions": versions,
            "mask": one.loss_mask[:count].tolist(),
            "logprobs": [round(value, 4) for value in one.logprobs[:count].tolist()],
            "weights": None,
            "trainer_logprobs": None,
            "advantages": None,
            "advantage": None,
        }

    @cached_property
    def _tokenizer(self) -> Tokenizer | None:
        try:
            return load_tokenizer(self._log.run.policy_dir(self._config))
        except ConfigError:
            return None

    @cached_property
    def _marks(self) -> Marks:
        return marks_of(self._tokenizer if self._config.data.chat_template else None)

    def _text(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if self._tokenizer is None else self._tokenizer.decode(list(ids))


def _line(one: Sample, sequence: int, became: str, entry: LedgerEntry) -> Line:
    versions = [str(span.version) for span in one.spans if span.version is not None]
    times = {"claimed": one.claimed_s, "started": one.started_s, "finished": one.finished_s, "scored": one.scored_s}
    return Line(
        batch=str(entry.version),
        became=became[:_NAME_CHARS],
        task=one.task,
        rollout=one.rollout,
        sample=one.sample,
        sequence=sequence,
        agent=one.agent[:_NAME_CHARS],
        branch_of=None if one.branch is None else one.branch.parent,
        reward=one.trained_reward,
        status=one.status.value,
        finish_reason=one.finish_reason[:_NAME_CHARS],
        num_tokens=len(one.tokens),
        num_trained=int(one.loss_mask.sum()),
        first_version=versions[0] if versions else "",
        last_version=versions[-1] if versions else "",
        engine=one.engine[:_NAME_CHARS],
        times={name: time_s for name, time_s in times.items() if time_s},
        turns=turns_of(one),
    )


def _spread(of_tokens: npt.NDArray[np.float32]) -> dict[str, float] | None:
    """Mean, least and greatest of numbers of the tokens that were trained; None where none was."""
    trained = of_tokens[~np.isnan(of_tokens)]
    if not trained.size:
        return None
    return {
        "mean": round(float(trained.mean(dtype=np.float64)), 4),
        "min": round(float(trained.min()), 4),
        "max": round(float(trained.max()), 4),
    }


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
