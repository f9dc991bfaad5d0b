"""What the gateway keeps of a session: entries of its journal, in order. A session is what its entries say.

```text
started -> turn* (reward)* -> ended
```

Tokens are stored as they were sampled. Of messages only digests are: a call's messages are recognised by them, and shown to nobody.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import msgspec

from streamrl.producers.completions import Completion
from streamrl.producers.episode import Origin, Segment
from streamrl.schemas.candidates import Candidates
from streamrl.schemas.experts import RoutedExperts
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.tasks import Sampling

TASK_PROMPT = -1
"""Parent of a turn that answers the prompt of the task."""
OWN_PROMPT = -2
"""Parent of a turn that answers a prompt rendered for its call: its `context` is all of it."""


class Tokens(msgspec.Struct, frozen=True):
    """A model's turn, packed: 12 bytes a token, here as in the journal, and what its engine said beside."""

    ids: bytes
    """int32, native order."""
    logprobs: bytes
    """float64."""
    spans: tuple[VersionSpan, ...]
    mode: LogprobMode
    finish_reason: str
    engine: str
    inexact: bool = False
    origin: Origin | None = None
    experts: RoutedExperts | None = None
    candidates: Candidates | None = None

    @classmethod
    def of(cls, made: Completion) -> Tokens:
        """As the engine gave them."""
        of = made.segment
        packed = packed_ids(of.token_ids), array("d", of.logprobs).tobytes()
        beside = of.inexact, of.origin, of.experts, of.candidates
        return cls(*packed, tuple(of.spans), made.logprob_mode, made.finish_reason, made.engine, *beside)

    def segment(self, sampling: Sampling) -> Segment:
        """The same as a part of an episode; `sampling`: as they were drawn."""
        made = self.inexact, sampling.temperature, self.origin, self.experts, sampling, self.candidates
        return Segment(self.token_ids, self.token_logprobs, self.spans, *made)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """As sampled; a stop token is the last."""
        return unpacked_ids(self.ids)

    @property
    def token_logprobs(self) -> tuple[float, ...]:
        """One for each token."""
        return tuple(array("d", self.logprobs))


class Started(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="started"):
    """An agent has been given the session."""

    nonce: str
    """Of its key: a key with another one is of nobody."""
    started_s: float
    request: str = ""
    """`Idempotency-Key` of who asked for it."""


class Turn(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="turn"):
    """A call was answered."""

    parent: int
    """Number of the turn that it goes on from, counted from 0; or `TASK_PROMPT` or `OWN_PROMPT`."""
    heard: tuple[bytes, ...] = ()
    """Digests of the messages that came since its parent; of a prompt of its own, all of them."""
    context: bytes = b""
    """Their tokens, int32."""
    family: int = 0
    """Of its prompt: 0 where the prompt begins with the task's, else a number for each prompt of the agent's own."""
    said: bytes
    """Digest of what it says, by its parsed value."""
    said_in_part: tuple[bytes, ...] = ()
    """Digests of it with its first call alone, and with its calls as text, where these are others: agents may ask for them so."""
    retold: tuple[int, ...] = ()
    """Numbers of earlier turns that its call tells in other words. They are no part of its path, and were not given up either."""
    tokens: Tokens
    sampling: Sampling
    seed: int
    """Number of the call, from which its seed is made."""
    request: bytes
    """Fingerprint of the call, by which it is known when it comes again."""
    key: str = ""
    """`Idempotency-Key` of the call."""
    made_s: float = 0.0


class Rewarded(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="reward"):
    """The agent has said what the rollout is worth; the newest counts."""

    reward: float
    parts: dict[str, float] = {}


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="ended"):
    """No further calls. Without a reason its turns are the rollout; with one it failed."""

    reason: str = ""
    """`failed` or `timeout`."""
    detail: str = ""


Entry = Started | Turn | Rewarded | Ended


def packed_ids(ids: Iterable[int]) -> bytes:
    """Token ids as int32."""
    return array("i", ids).tobytes()


def unpacked_ids(data: bytes) -> tuple[int, ...]:
    """The other way round."""
    return tuple(array("i", data))
