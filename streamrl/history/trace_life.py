"""What `streamrl trace` says of a task: a life as records, in JSON as they are. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.schemas.images import Image


class Tokens(msgspec.Struct, frozen=True):
    """Consecutive tokens of one version."""

    version: str
    tokens: int
    age: int | None
    """Versions from the one that sampled them to the one that they were trained from; None: not trained."""


class TurnLife(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of the model; times are None where they were not recorded."""

    tokens: int
    versions: tuple[Tokens, ...]
    before: int
    """Tokens of the environment in front of it: the prompt, a tool's answer."""
    engine: str
    finish_reason: str
    asked_s: float | None
    began_s: float | None
    finished_s: float | None


class Earlier(msgspec.Struct, frozen=True, kw_only=True):
    """A producer that had the task in hand before, as its reports say."""

    producer: str
    first_s: float
    """Of its first report with the task, by its clock."""
    last_s: float
    """Of the last."""


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """A task in the hands of a producer; times are None where they were not recorded."""

    issued_s: float | None = None
    producer: str = ""
    claimed_s: float | None = None
    deliveries: int = 1
    """How often it had been handed out; 1 where more were not recorded."""
    earlier: tuple[Earlier, ...] = ()
    """Who had it before, as far as their reports are there."""


class SampleLife(msgspec.Struct, frozen=True, kw_only=True):
    """One token sequence of a rollout."""

    sample: int
    tokens: int
    trained_tokens: int
    """With a loss mask of 1."""
    images: tuple[Image, ...] = ()
    """Of its task's row; its tokens were sampled without them."""
    status: str
    agent: str = ""
    """Whose own reward it is trained on; empty: it is the rollout's."""
    reward: float | None
    """That it is trained on."""
    reward_parts: dict[str, float]
    started_s: float | None
    finished_s: float | None
    scored_s: float | None
    turns: tuple[TurnLife, ...]
    counters: dict[str, float]
    """Of its engine, over the calls of these turns."""
    demonstration: bool


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the task on the sample stream, and what became of it."""

    sequence: int
    kind: str
    """`samples`, `tombstones` or `rewards`."""
    stored_s: float
    folded: str | None
    """The version whose batch closed with it folded; None: not yet."""
    detail: str
    """What it says, in words: a tombstone's reason, a reward's value, why it cannot be read."""
    rollouts: tuple[int, ...]
    """Which it is about; none: the task as a whole."""
    drops: tuple[str, ...]
    """Reasons of the ledger not to train it, or part of it."""


class RolloutLife(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout."""

    rollout: int
    state: str
    """`trained`, `baseline` (the greedy one of a trained group, of which nothing is), `dropped`, `ended`, `stored` or `open`."""
    why: str
    """Reasons where it was not trained."""
    sequence: int | None
    """Of the message with its samples, the one that counts."""
    samples: tuple[SampleLife, ...]


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """A task from its grant to its end."""

    run: str
    task: int
    source: str
    group_size: int
    state: str
    """`trained`, `dropped`, or `open`."""
    detail: str
    """Into which version, why not, or where it stands."""
    version: str | None
    """That it was trained into, or that was made next when it was dropped."""
    ended_s: float | None
    credit: str
    """With which credit it was issued, in words."""
    claim: Claimed | None
    """Of the delivery that gave what is stored; None: nothing is."""
    messages: tuple[Stored, ...]
    rollouts: tuple[RolloutLife, ...]
    notes: tuple[str, ...]
    """What the log does not have."""


def images_text(images: Sequence[Image]) -> str:
    """Number, types and sizes of a sample's images."""
    return f"{counted(len(images), 'image')}: {', '.join(f'{one.media_type} of {one.num_bytes} bytes' for one in images)}"


def counted(number: int, what: str = "version") -> str:
    """`1 version`, `2 versions`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
