"""Every subject, stream and key of a run, in one place."""

from __future__ import annotations

import re

import msgspec

from streamrl.errors import SchemaError

RUN_ID = re.compile(r"^[A-Za-z0-9_-]+$")

TASKS = "tasks"
SAMPLES = "samples"
LEDGER = "ledger"
WEIGHTS = "weights"
EVENTS = "events"
METRICS = "metrics"
DEAD = "dead"
GRADING = "grading"

KEY_GRANTED = "granted"
KEY_LATEST = "latest"
KEY_RUN = "run"
KEY_DATA = "data"
KEY_MIXTURE = "mixture"
KEY_ACCEPTED_GAP = "accepted/gap"
"""The ledger's last sequence, 0 for none, when somebody accepted what is missing of it."""
PREFIX_POSITIONS = "positions/"
PREFIX_FENCES = "fences/"
PREFIX_ENDS = "ends/"
PREFIX_PRESENCE = "presence/"
PREFIX_CHECKPOINTS = "checkpoints/"
PREFIX_ATTEMPTS = "attempts/"
PREFIX_PINS = "pins/"
PREFIX_RANKS = "ranks/"
PREFIX_BUDGETS = "budgets/"

WARMUP_SOURCE = "warmup"
"""Source of the demonstrations that a run may begin with."""
MAIN_SOURCE = "main"
"""Source of the rollouts."""

HEADER_TASK = "Streamrl-Task"
"""Task index of a sample message or tombstone, so that a message with a broken body still retires its task."""
HEADER_SCHEMA = "Streamrl-Schema"
"""Wire schema of the body, such as `samples/1`."""
HEADER_DIGEST = "Streamrl-Digest"
"""`streamrl.schemas.digests.body_digest` of the body as it was published; a message without one is not checked."""


def check_name(kind: str, name: str) -> str:
    """Return `name` if it can be a token of a subject; raises SchemaError otherwise."""
    if not RUN_ID.fullmatch(name):
        raise SchemaError(
            f"a {kind} may hold letters, digits, '_' and '-', got {name!r}",
            hint=f"rename the {kind}, for example to 'my-run'",
            kind=kind,
            name=name,
        )
    return name


class Subjects(msgspec.Struct, frozen=True):
    """The subjects of one run.

    A subject is `<run>.<kind>[.<source>]`; its second token says what the message is.
    """

    run: str

    def __post_init__(self) -> None:
        check_name("run id", self.run)

    def tasks(self, source: str) -> str:
        """Rollout tasks of one source."""
        return f"{self.run}.tasks.{check_name('source', source)}"

    def samples(self, source: str) -> str:
        """Arrow batches of whole rollouts."""
        return f"{self.run}.samples.{check_name('source', source)}"

    def tombstones(self, source: str) -> str:
        """Ends of tasks or rollouts that gave no sample (stream `samples`)."""
        return f"{self.run}.tombstones.{check_name('source', source)}"

    def grading(self, source: str) -> str:
        """Requests for rewards of one source (stream `grading`)."""
        return f"{self.run}.grading.{check_name('source', source)}"

    @property
    def rewards(self) -> str:
        """Rewards that come after their samples (stream `samples`)."""
        return f"{self.run}.rewards"

    @property
    def marks(self) -> str:
        """Operator's marks: a change of configuration, a drain (stream `samples`)."""
        return f"{self.run}.marks"

    def ledger(self, trainer: str) -> str:
        """Ledger of one trainer."""
        return f"{self.run}.ledger.{check_name('trainer', trainer)}"

    def weights(self, policy: str) -> str:
        """Manifests of one policy."""
        return f"{self.run}.weights.{check_name('policy', policy)}"

    def events(self, kind: str) -> str:
        """Lifecycle events for people."""
        return f"{self.run}.events.{check_name('event kind', kind)}"

    def metrics(self, worker: str) -> str:
        """Metrics of one worker."""
        return f"{self.run}.metrics.{check_name('worker', worker)}"

    @property
    def dead(self) -> str:
        """Quarantined messages."""
        return f"{self.run}.dead"


def kind_of(subject: str) -> str:
    """Second token of a subject: `tasks`, `samples`, `tombstones`, `rewards`, `marks`, ...; empty if it has one token only."""
    return subject.split(".", 2)[1] if "." in subject else ""


def source_of(subject: str) -> str:
    """Third token of a subject, or an empty string."""
    return subject.split(".", 2)[2] if subject.count(".") >= 2 else ""
