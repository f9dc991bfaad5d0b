"""What a replay found, and why a version came out differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET

from streamrl.consumers.training.steps import Stepped, recorded_choices, same_result
from streamrl.core.assembly import ages
from streamrl.schemas.ledger import Choices, LedgerEntry

COMPARED = ("train/loss", "train/grad_norm", "train/tis", "train/entropy_loss", "train/answer_probability")
"""Metrics that follow the digits; those of other numerics stay close, and are compared by tolerance."""
CRITIC = "train/value_norm"
"""Stands for the critic's parameters, which no digest in the ledger covers."""
QUOTED = 400
"""Letters of a value that a report quotes; an entry may have any number of drops."""


class Difference(msgspec.Struct, frozen=True):
    """The first version that came out differently."""

    version: str
    what: str
    cause: str
    """`config`, `initial weights`, `data`, `schema`, `numerics`, or `unknown`: same batch, same fingerprint, other digits."""
    detail: str = ""


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay found."""

    run: str
    versions: int
    """Ledger entries replayed."""
    equal: int
    """Entries whose digest came out the same."""
    began: str = "0.0"
    """Version that it began from: the initial weights, or a checkpoint."""
    ended: str = "0.0"
    first_difference: Difference | None = None
    same_fingerprint: bool = True
    """Whether the numerics fingerprint equals the ledger's; if not, digits may differ without anything being wrong."""
    fingerprint_lines: tuple[str, ...] = ()
    """Entries of the fingerprint that differ, where the run told them."""
    deviation: float = 0.0
    """Greatest distance of a compared metric from the ledger's, as a fraction of its mean magnitude over the ledger."""
    deviation_of: str = ""
    """Which metric at which version that was."""
    tolerance: float = 0.0
    """Greatest deviation that passes when the fingerprints differ."""
    problem: str = ""
    """Why it could not go on, or an empty string."""
    lost: tuple[str, ...] = ()
    """What of these versions the log has no more, in words."""
    digest: str = ""
    """Digest of the parameters at the end."""

    @property
    def by_tolerance(self) -> bool:
        """Whether digests differ, and may: the fingerprint is another one and the batches are the ledger's."""
        first = self.first_difference
        return first is not None and first.cause == "numerics" and not self.same_fingerprint

    @property
    def ok(self) -> bool:
        """Whether nothing is lost and every entry came out with its digest, or on another fingerprint within the tolerance."""
        if self.problem or self.lost or not self.versions:
            return False
        return self.first_difference is None or (self.by_tolerance and self.deviation <= self.tolerance)

    @property
    def lines(self) -> list[str]:
        """The report for a person."""
        found: list[str] = []
        if not self.same_fingerprint:
            found.append("numerics fingerprint differs from the run's: digits may differ without a fault")
            found += [f"  {line}" for line in self.fingerprint_lines or ("the run's values are not recorded",)]
        found.append(f"{self.equal} of {self.versions} versions after {self.began} have the digest of the ledger")
        first = self.first_difference
        if first is not None:
            found.append(f"first difference: version {first.version}: {first.what}")
            found.append(f"cause: {first.cause}" + (f": {first.detail}" if first.detail else ""))
        if self.by_tolerance:
            verdict = "within" if self.deviation <= self.tolerance else "beyond"
            found.append(
                f"compared by tolerance: the greatest deviation is {self.deviation:.2g} ({self.deviation_of}), {verdict} {self.tolerance:g}"
            )
        found += [f"lost: {text}" for text in self.lost]
        if self.problem:
            found.append(f"stopped: {self.problem}")
        return found


class Comparison:
    """Holds replayed versions against their ledger entries, one after the other.

    Args:
        entries: all that will be replayed; their mean magnitudes are the scale of deviations.
        same_fingerprint: see `ReplayReport`.
        known_cause: (cause, detail) found beforehand that explains any other digit: the configuration or the initial weights.
    """

    def __init__(self, entries: Sequence[LedgerEntry], *, same_fingerprint: bool, known_cause: tuple[str, str] | None) -> None:
        self.versions = 0
        self.equal = 0
        self.first: Difference | None = None
        self.deviation = 0.0
        self.deviation_of = ""
        self._same_fingerprint = same_fingerprint
        self._known_cause = known_cause
        self._scale = {name: _magnitude(entries, name) for name in COMPARED}

    def add(self, stepped: Stepped, past: LedgerEntry) -> bool:
        """One more version; returns whether its digest, and its reference and critic where it has them, are the ledger's."""
        same_policy = stepped.result.digest == past.digest
        same_reference = same_result(stepped.result, past) or not same_policy
        ours, theirs = stepped.metrics.get(CRITIC), past.metrics.get(CRITIC)
        same = same_policy and same_reference and ours == theirs
        self.versions += 1
        self.equal += same
        for name, distance in self._deviations(stepped.metrics, past.metrics).items():
            if distance > self.deviation:
                self.deviation, self.deviation_of = distance, f"{name} at version {past.version}"
        books = differing_books(stepped, past)
        if self.first is None and (books or not same):
            what = books
            if not same_policy:
                what = f"the ledger has digest {past.digest}, the replay {stepped.result.digest}"
            elif not same_reference:
                digests = f"{past.reference or 'none'} in the ledger, {stepped.result.reference or 'none'} in the replay"
                what = f"the reference has digest {digests}; the policy's are the same"
            elif not same:
                what = f"the critic's parameters have norm {theirs!r} in the ledger, {ours!r} in the replay; the policy's are the same"
            self.first = Difference(str(past.version), what, *self._cause(stepped, past, books))
        return same

    def _cause(self, stepped: Stepped, past: LedgerEntry, books: str) -> tuple[str, str]:
        if self._known_cause is not None:
            return self._known_cause
        if books:
            return "data", books
        if past.micro_tokens is not UNSET and past.micro_tokens != stepped.result.micro_tokens:
            return (
                "numerics",
                f"micro-batches of {past.micro_tokens} tokens in the ledger, {stepped.result.micro_tokens} here: out of memory",
            )
        if computed := differing_choices(stepped.result.choices, past):
            return "numerics", computed
        if not self._same_fingerprint:
            return "numerics", "the fingerprints differ, the batch is the same"
        distances = self._deviations(stepped.metrics, past.metrics)
        name = max(distances, key=lambda key: distances[key], default="")
        detail = "batch and fingerprint are the same"
        if name:
            detail += f"; {name} is {past.metrics[name]!r} in the ledger, {stepped.metrics[name]!r} here"
        return "unknown", detail

    def _deviations(self, ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
        names = [name for name in COMPARED if name in ours and name in theirs and self._scale[name] > 0]
        return {name: abs(ours[name] - theirs[name]) / self._scale[name] for name in names}


def differing_books(stepped: Stepped, past: LedgerEntry) -> str:
    """What of the batch itself is not as the ledger has it; an empty string if all is. Numerics have no part in these numbers."""
    before, arrays = stepped.before, stepped.arrays
    pairs: list[tuple[str, object, object]] = [
        ("samples", past.num_samples, arrays.num_samples),
        ("tokens", past.num_tokens, arrays.num_tokens),
        ("ages", past.staleness, tuple(ages(stepped.batch, before)["total"])),
        ("drops", past.drops, before.drops),
    ]
    for name in ("rollout/raw_reward", "rollout/tokens_trained", "staleness/mean"):
        if name in past.metrics and name in stepped.metrics:
            pairs.append((name, past.metrics[name], stepped.metrics[name]))
    found = [f"{name}: {_short(theirs)} in the ledger, {_short(ours)} here" for name, theirs, ours in pairs if theirs != ours]
    return "; ".join(found)


def differing_choices(choices: Choices | None, past: LedgerEntry) -> str:
    """How a version was computed otherwise than its entry says, as far as digits depend on it; an empty string if it was not."""
    ours, theirs = choices or Choices(), recorded_choices(past) or Choices()
    found = [
        f"{name}: {getattr(theirs, name)} in the ledger, {getattr(ours, name)} here" for name in ("attention", "compiled", "row_length")
    ]
    same = [ours.attention in (theirs.attention, "flash"), ours.compiled == theirs.compiled, ours.row_length == theirs.row_length]
    return "; ".join(text for text, equal in zip(found, same, strict=True) if not equal)  # older entries do not name `flash`


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= QUOTED else f"{text[:QUOTED]}... ({len(text)} letters)"


def _magnitude(entries: Sequence[LedgerEntry], name: str) -> float:
    values = [abs(entry.metrics[name]) for entry in entries if name in entry.metrics]
    return sum(values) / len(values) if values else 0.0
