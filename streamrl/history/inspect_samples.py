"""Stored samples for people: their text, who sampled which token, and what is trained on. Pure but for the tokenizer it is given."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from streamrl.history.trace import WIDTH, Life, counted, images_text, printable
from streamrl.schemas.images import Image
from streamrl.schemas.samples import Sample

Decode = Callable[[Sequence[int]], str]
_SILENT = ([], (), {}, "", -1, False)
"""Values of sampling that say nothing; a temperature of 0 does."""


class Piece(msgspec.Struct, frozen=True):
    """Consecutive tokens of one version, all of them trained on or none."""

    start: int
    tokens: int
    version: str | None
    """None: no model sampled them."""
    trained: bool
    text: str
    logprob_sum: float


class Token(msgspec.Struct, frozen=True):
    """One token."""

    id: int
    text: str
    trained: bool
    version: str | None
    logprob: float | None
    """None: no model sampled it."""


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """One stored sample."""

    task: int
    rollout: int
    sample: int
    sequence: int
    became: str
    """What became of its rollout; empty: not looked up."""
    agent: str = ""
    """Whose own reward it is trained on; empty: it is the rollout's."""
    branch_of: int | None = None
    """The sample of its rollout that it has left."""
    reward: float | None
    """That it is trained on."""
    reward_parts: dict[str, float]
    status: str
    finish_reason: str
    engine: str
    producer: str
    seed: int
    counters: dict[str, float]
    """Of its engine, over the calls of its turns (docs/inspect.md)."""
    sampling: dict[str, Any]
    label: Any
    metadata: dict[str, Any]
    images: tuple[Image, ...] = ()
    """Of its task's row; its tokens were sampled without them."""
    prompt: str
    answer: str
    """What follows the prompt, the environment's part of it too."""
    pieces: tuple[Piece, ...]
    tokens: tuple[Token, ...] | None = None
    """Only where they were asked for."""
    num_tokens: int
    num_trained: int


def show(sample: Sample, sequence: int, decode: Decode, *, life: Life | None = None, tokens: bool = False) -> Shown:
    """One sample with its texts.

    Args:
        sample: as stored.
        sequence: of its message.
        decode: token ids to text.
        life: of its task, where that is known.
        tokens: whether each token is wanted.
    """
    pieces = tuple(_pieces(sample, decode))
    prompt = pieces[0].tokens if pieces and pieces[0].version is None and not pieces[0].trained else 0
    rollout = next((one for one in life.rollouts if one.rollout == sample.rollout), None) if life is not None else None
    became = "" if rollout is None else f"{rollout.state}: {rollout.why}" if rollout.why else rollout.state
    return Shown(
        task=sample.task,
        rollout=sample.rollout,
        sample=sample.sample,
        sequence=sequence,
        became=became,
        agent=sample.agent,
        branch_of=None if sample.branch is None else sample.branch.parent,
        reward=sample.trained_reward,
        reward_parts=sample.reward_parts,
        status=sample.status.value,
        finish_reason=sample.finish_reason,
        engine=sample.engine,
        producer=sample.producer,
        seed=sample.seed,
        counters=sample.counters,
        sampling=msgspec.to_builtins(sample.sampling, str_keys=True),
        label=sample.label,
        metadata=sample.metadata,
        images=sample.image_rows,
        prompt=decode(sample.tokens[:prompt].tolist()),
        answer=decode(sample.tokens[prompt:].tolist()),
        pieces=pieces,
        tokens=tuple(_tokens(sample, decode)) if tokens else None,
        num_tokens=len(sample.tokens),
        num_trained=int(sample.loss_mask.sum()),
    )


def versions_of(sample: Sample) -> list[str | None]:
    """[T] the version of each token, None where no model sampled it."""
    return [None if span.version is None else str(span.version) for span in sample.spans for _ in range(span.length)]


def _pieces(sample: Sample, decode: Decode) -> Iterator[Piece]:
    keys = list(zip(versions_of(sample), sample.loss_mask.tolist(), strict=True))
    start = 0
    for (version, trained), group in groupby(keys):
        end = start + len(list(group))
        text = decode(sample.tokens[start:end].tolist())
        yield Piece(start, end - start, version, bool(trained), text, float(sample.logprobs[start:end].sum()))
        start = end


def _tokens(sample: Sample, decode: Decode) -> Iterator[Token]:
    columns = zip(sample.tokens.tolist(), sample.loss_mask.tolist(), versions_of(sample), sample.logprobs.tolist(), strict=True)
    for id, trained, version, logprob in columns:
        yield Token(id, decode([id]), bool(trained), version, None if version is None else logprob)


def group_text(shown: Sequence[Shown]) -> str:
    """The samples of a task side by side, at most 80 columns wide."""
    first = shown[0]
    lines = [f"task {first.task}: {counted(len(shown), 'sample')} of {counted(len({one.rollout for one in shown}), 'rollout')}"]
    lines += _folded("prompt  ", first.prompt) + ([] if first.label is None else _folded("label   ", str(first.label)))
    longest = max(len(one.agent) for one in shown)
    width = min(12, max(5, longest)) if longest else 0
    agents = f"{'AGENT':{width}}  " if width else ""
    lines += ["", f"{'ROLLOUT':>7}  {agents}{'REWARD':>8}  {'TOKENS':>6}  {'VERSIONS':12}  {'BECAME':12}  ANSWER"]
    for one in shown:
        versions = list(dict.fromkeys(piece.version for piece in one.pieces if piece.version is not None))
        span = "-" if not versions else versions[0] if len(versions) == 1 else f"{versions[0]}..{versions[-1]}"
        place = f"{one.rollout}.{one.sample}" if one.sample else str(one.rollout)
        reward = "-" if one.reward is None else f"{one.reward:.4g}"
        agent = f"{one.agent[:width]:{width}}  " if width else ""
        row = f"{place:>7}  {agent}{reward:>8}  {one.num_tokens:>6}  {span:12}  {one.became[:12]:12}  "
        lines.append((row + _one_line(one.answer, WIDTH - len(row))).rstrip())
    return "\n".join(lines)


def sample_text(one: Shown) -> str:
    """One sample in full: a line for each stretch of one version, with its mask; its tokens where they were asked for."""
    name = f"task {one.task}/{one.rollout}" + (f", sample {one.sample}" if one.sample else "")
    name += f", agent {one.agent}" if one.agent else ""
    name += "" if one.branch_of is None else f", branch of sample {one.branch_of}"
    parts = ", ".join(f"{part} {value:g}" for part, value in one.reward_parts.items())
    reward = "no reward" if one.reward is None else f"reward {one.reward:g}{f' ({parts})' if parts else ''}"
    head = f"{name}, message {one.sequence}: {reward}; {one.status}, {counted(one.num_tokens, 'token')}, {one.num_trained} trained on"
    lines = textwrap.wrap(f"{head}; {one.became}" if one.became else head, WIDTH, subsequent_indent="  ")
    sampling = ", ".join(f"{key} {value}" for key, value in one.sampling.items() if value not in _SILENT or key == "temperature")
    by = f"by {one.engine or 'no engine'}, {one.producer or 'no producer'}; seed {one.seed}; {sampling}"
    lines += textwrap.wrap(by, WIDTH, initial_indent="  ", subsequent_indent="  ")
    counts = ", ".join(f"{name} {value:g}" for name, value in one.counters.items())
    lines += textwrap.wrap(f"engine: {counts}", WIDTH, initial_indent="  ", subsequent_indent="  ") if counts else []
    lines += [] if one.label is None else _folded("  label   ", str(one.label))
    lines += [] if not one.metadata else _folded("  metadata ", msgspec.json.encode(one.metadata).decode())
    lines += textwrap.wrap(images_text(one.images), WIDTH, initial_indent="  ", subsequent_indent="  ") if one.images else []
    lines += ["", "  VERSION  MASK  TEXT"]
    for piece in one.pieces:
        lines += _folded(f"  {piece.version or '-':8} {'1' if piece.trained else '.':4}  ", piece.text)
    if one.tokens is not None:
        lines += ["", f"  {'AT':>6}  {'ID':>8}  {'VERSION':8}  MASK  {'LOG-PROB':>10}  TEXT"]
        for place, token in enumerate(one.tokens):
            logprob = "" if token.logprob is None else f"{token.logprob:.6f}"
            row = f"  {place:>6}  {token.id:>8}  {token.version or '-':8}  {'1' if token.trained else '.':4}  {logprob:>10}  "
            lines.append(row + _one_line(token.text, WIDTH - len(row)))
    return "\n".join(line.rstrip() for line in lines)


def _folded(name: str, text: str) -> list[str]:
    """A text of any lines behind a name, in the columns that are left."""
    found: list[str] = []
    for line in printable(text, lines=True).split("\n"):
        found += textwrap.wrap(line, WIDTH - len(name), replace_whitespace=False, drop_whitespace=False) or [""]
    return [(name if place == 0 else " " * len(name)) + line for place, line in enumerate(found)]


def _one_line(text: str, width: int) -> str:
    shown = printable(text)
    return shown if len(shown) <= width else shown[: max(0, width - 3)] + "..."
