"""What each role of a run may do on the bus, as the subjects that its user may publish to.

| role      | stores                                                           | reads                      | else                         |
|-----------|------------------------------------------------------------------|----------------------------|------------------------------|
| operator  | everything                                                       | everything                 | makes and deletes streams    |
| trainer   | ledger, weights, marks, tombstones, blobs, dead, grant, ...      | samples, ledger, weights,  | trims samples, retires blobs |
|           |                                                                  | blobs, queued tasks        |                              |
| producer  | samples and their blobs, tombstones, rewards, checkpoints,       | events, samples' blobs     | claims tasks                 |
|           | attempts, `stalled`                                              |                            |                              |
| gateway   | as a producer, and the turns of open sessions                    | events, samples' blobs,    | claims tasks                 |
|           |                                                                  | turns                      |                              |
| engine    | presence of engines, pins, events `weights` and `engine`         | weights, blobs             |                              |
| rewarder  | rewards, tombstones, `stalled`                                   | events                     | claims requests for rewards  |
| feeder    | tasks and their images, keys `data` and `mixture`, events        | queued tasks, ledger       |                              |
|           | `stalled`, `resumed`                                             |                            |                              |
| evaluator | event `evaluation`, pins                                         | ledger, events             |                              |
| reader    | nothing                                                          | everything but tasks       |                              |

Every worker also reads the keys and stores its own metrics, events and presence. Reading is asking JetStream's API for single messages
or batches of them, and hearing what is stored from then on; a role has that of the streams that it reads and of no other. Nobody but the
operator makes streams or consumers.

NATS does not check the subject that an answer is to be sent to. So each role has an account of its own (`streamrl.bus.accounts`), in
which nothing is there but these subjects: an answer comes back within that account, and reaches by it no more than its asker may do.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from streamrl.bus.address import API, OPERATOR, ROLE_API, inbox
from streamrl.bus.topology import blobs_name, keys_name, sample_bucket, stored_subject, stream_name, turn_bucket
from streamrl.schemas.subjects import DEAD, EVENTS, GRADING, LEDGER, METRICS, SAMPLES, TASKS, WEIGHTS

READER = "reader"
ROLES = ("trainer", "producer", "gateway", "rewarder", "engine", "feeder", "evaluator", READER)
"""Roles whose rights are limited. A worker's role is its kind."""


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    """What a role may do in a run: subjects in NATS's notation, as they are called where the run's streams are."""

    asks: tuple[str, ...]
    """It may publish there; an answer is one message."""
    batches: tuple[str, ...]
    """It may publish there; an answer is several messages."""
    hears: tuple[str, ...]
    """It may subscribe there."""


class User(msgspec.Struct, frozen=True, kw_only=True):
    """One user of a run's server. Its replies come under `inbox`; with `rights` None it may do everything."""

    name: str
    password: str
    role: str = OPERATOR
    rights: Rights | None = None

    def __repr__(self) -> str:
        return f"User(name={self.name!r})"

    @property
    def inbox(self) -> str:
        """First token of its reply subjects."""
        return inbox(self.role) if self.rights is not None else "_INBOX"

    @property
    def api(self) -> str:
        """What the subjects of JetStream's API begin with for it."""
        return ROLE_API if self.rights is not None else API


def allowed(role: str, run: str) -> Rights:
    """What `role` may do in `run`; KeyError for a role that is not in ROLES."""
    tasks, samples, grading = stream_name(run, TASKS), stream_name(run, SAMPLES), stream_name(run, GRADING)
    bucket = sample_bucket(run)
    blobs, beside, turns = blobs_name(run), blobs_name(bucket), keys_name(turn_bucket(run))
    worker = [f"{run}.metrics.*", f"$KV.{run}.presence.workers.*"]
    stalls = [f"{run}.events.stalled", f"{run}.events.resumed"]
    of_tasks = [f"$KV.{run}.checkpoints.*.*", f"$KV.{run}.attempts.*"]  # the trainer's reaper removes them
    stores_beside = [f"$O.{bucket}.C.*", f"$O.{bucket}.M.*"]
    produces = [
        *worker,
        *stalls,
        *(f"{run}.{subject}" for subject in ("samples.*", "tombstones.*", "rewards", "grading.*")),
        *of_tasks,
        *stores_beside,
        f"{API}.CONSUMER.INFO.{tasks}.*",
        f"$JS.ACK.{tasks}.>",
    ]
    stores: dict[str, list[str]] = {
        "trainer": [
            *worker,
            *(f"{run}.{subject}" for subject in ("ledger.*", "weights.*", "marks", "tombstones.*", "dead", "events.*")),
            *(f"$KV.{run}.{key}" for key in ("granted", "latest.*", "positions.*", "fences.*", "ends.*", "ranks.*", "budgets.*")),
            *of_tasks,
            f"{API}.STREAM.INFO.{tasks}",
            f"{API}.STREAM.MSG.GET.{tasks}",
            f"{API}.STREAM.INFO.{grading}",
            f"$O.{run}.C.*",
            f"$O.{run}.M.*",
            f"{API}.STREAM.PURGE.{samples}",
            f"{API}.STREAM.PURGE.{blobs}",
            f"{API}.STREAM.PURGE.{beside}",
            f"{API}.STREAM.PURGE.{turns}",
        ],
        "producer": produces,
        "gateway": [*produces, f"{run}.events.notice", f"$KV.{turn_bucket(run)}.*.*.*", f"{API}.STREAM.PURGE.{turns}"],
        "rewarder": [
            *worker,
            *stalls,
            f"{run}.rewards",
            f"{run}.tombstones.*",
            f"{API}.STREAM.INFO.{grading}",
            f"{API}.CONSUMER.INFO.{grading}.*",
            f"$JS.ACK.{grading}.>",
        ],
        "engine": [
            *worker,
            f"{run}.events.weights",
            f"{run}.events.engine",
            f"$KV.{run}.presence.engines.*",
            f"$KV.{run}.pins.*.*.*",
        ],
        "feeder": [
            *worker,
            *stalls,
            f"$KV.{run}.data",
            f"$KV.{run}.mixture",
            f"{run}.tasks.*",
            f"{API}.STREAM.INFO.{tasks}",
            f"{API}.STREAM.MSG.GET.{tasks}",
            *stores_beside,
            f"{API}.STREAM.INFO.{beside}",
            f"{API}.STREAM.MSG.GET.{beside}",
        ],
        "evaluator": [*worker, f"{run}.events.evaluation", f"$KV.{run}.pins.*.*.*"],
        READER: [f"{API}.STREAM.INFO.{tasks}", f"{API}.STREAM.INFO.{grading}"],
    }
    reads = {
        "trainer": (SAMPLES, LEDGER, WEIGHTS),
        "producer": (EVENTS,),
        "gateway": (EVENTS,),
        "rewarder": (EVENTS,),
        "engine": (WEIGHTS,),
        "feeder": (LEDGER,),
        "evaluator": (LEDGER, EVENTS),
        READER: (SAMPLES, LEDGER, WEIGHTS, EVENTS, METRICS, DEAD),
    }[role]
    followed = [keys_name(run), *(stream_name(run, stream) for stream in reads)]
    read = followed + ([blobs] if role in ("trainer", "engine", READER) else [])
    read += [beside] if role in ("trainer", "producer", "gateway", READER) else []
    read += [turns] if role == "gateway" else []
    batches = [f"{API}.DIRECT.GET.{stream}" for stream in read]
    if role in ("producer", "gateway"):
        batches.append(f"{API}.CONSUMER.MSG.NEXT.{tasks}.*")
    if role == "rewarder":
        batches.append(f"{API}.CONSUMER.MSG.NEXT.{grading}.*")
    if role in ("feeder", "trainer"):  # the trainer ends tasks whose messages are gone, see streamrl.consumers.training.reaper
        batches.append(f"{API}.DIRECT.GET.{tasks}")
    return Rights(
        asks=(*stores[role], *(f"{API}.{verb}.{stream}" for stream in read for verb in ("STREAM.INFO", "STREAM.MSG.GET"))),
        batches=tuple(batches),
        hears=tuple(stored_subject(stream) for stream in followed),
    )


def role_users(run: str, passwords: Sequence[tuple[str, str]], *, name: str = "{role}") -> list[User]:
    """Users from (role, password) pairs, called by `name`; the operator's has no limits."""
    return [
        User(name=name.replace("{role}", role), password=password, role=role, rights=None if role == OPERATOR else allowed(role, run))
        for role, password in passwords
    ]
