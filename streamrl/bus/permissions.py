"""What each role of a run may do on the bus, as the subjects that its user may publish to.

| role      | stores                                                     | reads                    | else                         |
|-----------|------------------------------------------------------------|--------------------------|------------------------------|
| operator  | everything                                                 | everything               | makes and deletes streams    |
| trainer   | ledger, weights, marks, blobs, dead, grant, positions, ... | samples, ledger, weights | trims samples, retires blobs |
| producer  | samples, tombstones, rewards, checkpoints of rollouts      | events                   | claims tasks                 |
| engine    | presence of engines, pins                                  | weights, blobs           |                              |
| feeder    | tasks                                                      |                          |                              |
| evaluator | event `evaluation`, pins                                   | ledger, events           |                              |
| reader    | nothing                                                    | everything but tasks     |                              |

Every worker also reads the keys and stores its own metrics, events and presence. Reading is asking JetStream's API, which is a
publication too; a role has the API of the streams that it reads and of no other. Streams and the consumers of tasks are made by
the operator beforehand.

NATS does not check the subject that an answer is to be sent to, so a role can have an answer stored where it may not publish. Most
answers are JSON, which no reader of a stream takes for a record, and delivered messages keep their own subject. The one request that
answers with stored bytes under a subject of the asker's choice, DIRECT.GET, is the trainer's alone: nobody else can forge its records.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.bus.topology import blobs_name, keys_name, stream_name
from streamrl.schemas.subjects import DEAD, EVENTS, LEDGER, METRICS, SAMPLES, TASKS, WEIGHTS

OPERATOR = "operator"
READER = "reader"
ROLES = ("trainer", "producer", "engine", "feeder", "evaluator", READER)
"""Roles whose rights are limited. A worker's role is its kind."""
API = "$JS.API"


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One user of the embedded server. Its replies come under `inbox`; with `publish` None it may do everything."""

    name: str
    password: str
    publish: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"User(name={self.name!r})"

    @property
    def inbox(self) -> str:
        """First token of its reply subjects: users cannot read each other's replies."""
        return f"_INBOX_{self.name}"


def allowed(role: str, run: str) -> tuple[str, ...]:
    """Subjects that `role` may publish to in `run`, in NATS's notation; KeyError for a role that is not in ROLES."""
    tasks, samples = stream_name(run, TASKS), stream_name(run, SAMPLES)
    keys, blobs = keys_name(run), blobs_name(run)
    worker = [f"{run}.metrics.*", f"$KV.{run}.presence.workers.*", *_reads(keys)]
    stalls = [f"{run}.events.stalled", f"{run}.events.resumed"]
    rights: dict[str, list[str]] = {
        "trainer": [
            *worker,
            *(f"{run}.{subject}" for subject in ("ledger.*", "weights.*", "marks", "dead", "events.*")),
            *(f"$KV.{run}.{key}" for key in ("granted", "latest.*", "positions.*", "fences.*", "ranks.*")),
            *(subject for stream in (SAMPLES, LEDGER, WEIGHTS) for subject in _reads(stream_name(run, stream))),
            *_reads(blobs),
            f"{API}.DIRECT.GET.{samples}",
            f"{API}.DIRECT.GET.{stream_name(run, WEIGHTS)}",
            f"$O.{run}.C.*",
            f"$O.{run}.M.*",
            f"{API}.STREAM.PURGE.{samples}",
            f"{API}.STREAM.PURGE.{blobs}",
        ],
        "producer": [
            *worker,
            *stalls,
            *(f"{run}.{subject}" for subject in ("samples.*", "tombstones.*", "rewards")),
            f"$KV.{run}.checkpoints.*.*",
            *_reads(stream_name(run, EVENTS)),
            f"{API}.CONSUMER.INFO.{tasks}.*",
            f"{API}.CONSUMER.MSG.NEXT.{tasks}.*",
            f"$JS.ACK.{tasks}.>",
        ],
        "engine": [
            *worker,
            f"{run}.events.weights",
            f"{run}.events.engine",
            f"$KV.{run}.presence.engines.*",
            f"$KV.{run}.pins.*.*.*",
            *_reads(stream_name(run, WEIGHTS)),
            *_reads(blobs),
        ],
        "feeder": [*worker, *stalls, f"{run}.tasks.*", f"{API}.STREAM.INFO.{tasks}", f"{API}.STREAM.MSG.GET.{tasks}"],
        "evaluator": [
            *worker,
            f"{run}.events.evaluation",
            f"$KV.{run}.pins.*.*.*",
            *_reads(stream_name(run, LEDGER)),
            *_reads(stream_name(run, EVENTS)),
        ],
        READER: [
            *_reads(keys),
            *_reads(blobs),
            *(subject for stream in (SAMPLES, LEDGER, WEIGHTS, EVENTS, METRICS, DEAD) for subject in _reads(stream_name(run, stream))),
            f"{API}.STREAM.INFO.{tasks}",
        ],
    }
    return tuple(rights[role])


def role_users(run: str, passwords: Sequence[tuple[str, str]]) -> list[User]:
    """Users from (role, password) pairs; the operator's has no limits."""
    return [User(name=role, password=password, publish=None if role == OPERATOR else allowed(role, run)) for role, password in passwords]


def _reads(stream: str) -> list[str]:
    """The API for reading one stream: its state, single messages, and throw-away consumers."""
    return [
        f"{API}.STREAM.INFO.{stream}",
        f"{API}.STREAM.MSG.GET.{stream}",
        f"{API}.CONSUMER.CREATE.{stream}.>",
        f"{API}.CONSUMER.MSG.NEXT.{stream}.*",
        f"{API}.CONSUMER.DELETE.{stream}.*",
    ]
