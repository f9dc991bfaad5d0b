"""The streams of a run, as data.

| stream  | subjects                                  | kept until                         | when full    |
|---------|-------------------------------------------|------------------------------------|--------------|
| tasks   | tasks.<source>                            | a producer is done with it         | no limit     |
| samples | samples, tombstones, rewards, marks       | trimmed below what readers need    | refuses      |
| grading | grading.<source>                          | a rewarder is done with it         | no limit     |
| ledger  | ledger.<trainer>                          | for ever                           | no limit     |
| weights | weights.<policy>                          | the budget drops the oldest        | drops oldest |
| events  | events.<kind>                             | the budget drops the oldest        | drops oldest |
| metrics | metrics.<worker>                          | the budget drops the oldest        | drops oldest |
| dead    | dead                                      | an operator trims it               | refuses      |

Keys and blobs lie in streams of their own, in the layouts that the `nats` command line calls key-value and object stores.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from streamrl.config.tree import BusConfig
from streamrl.errors import BusError, LogTruncated, SchemaError
from streamrl.schemas import subjects
from streamrl.schemas.subjects import RUN_ID, check_name, kind_of

CONTROL = re.compile(r"[\x00-\x1f]")
HEADER_NAME = re.compile(r"^[A-Za-z0-9-]+$")
MEBIBYTE = 1 << 20
MAX_PAYLOAD_BYTES = 8 * MEBIBYTE
"""Largest message (headers and body) of the embedded server and of the in-process bus."""
PAYLOAD_ROOM_BYTES = 1024
"""Kept free below the server's limit: a message above it makes the server cut the connection."""


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One stream. `dedupe_s` is how long a message id is remembered; the server keeps the ids in memory, about 300 bytes each."""

    name: str
    kinds: tuple[str, ...]
    """Second tokens of the subjects that the stream holds."""
    queue: bool = False
    """A work queue: messages are claimed and vanish when done."""
    full: Literal["refuse", "drop_oldest"] = "refuse"
    max_bytes: int = -1
    """Byte budget; -1: none."""
    dedupe_s: float = 120.0


def streams(config: BusConfig) -> dict[str, StreamSpec]:
    """All streams of a run by name."""
    half_hour = 1800.0
    day = 86400.0
    specs = (
        StreamSpec(name=subjects.TASKS, kinds=("tasks",), queue=True, dedupe_s=half_hour),
        StreamSpec(
            name=subjects.SAMPLES, kinds=("samples", "tombstones", "rewards", "marks"), max_bytes=config.samples_bytes, dedupe_s=half_hour
        ),
        StreamSpec(name=subjects.GRADING, kinds=("grading",), queue=True, dedupe_s=half_hour),
        StreamSpec(name=subjects.LEDGER, kinds=("ledger",), dedupe_s=day),
        StreamSpec(name=subjects.WEIGHTS, kinds=("weights",), full="drop_oldest", max_bytes=256 * MEBIBYTE),
        StreamSpec(name=subjects.EVENTS, kinds=("events",), full="drop_oldest", max_bytes=64 * MEBIBYTE),
        StreamSpec(name=subjects.METRICS, kinds=("metrics",), full="drop_oldest", max_bytes=128 * MEBIBYTE),
        StreamSpec(name=subjects.DEAD, kinds=("dead",), max_bytes=256 * MEBIBYTE, dedupe_s=half_hour),
    )
    return {spec.name: spec for spec in specs}


class Topology(msgspec.Struct, frozen=True):
    """Streams of one run, and which of them a subject belongs to."""

    run: str
    streams: dict[str, StreamSpec]
    by_kind: dict[str, StreamSpec]

    @classmethod
    def of(cls, run: str, config: BusConfig) -> Topology:
        """Topology of a run; raises SchemaError for a run id that cannot be a subject token."""
        specs = streams(config)
        return cls(check_name("run id", run), specs, {kind: spec for spec in specs.values() for kind in spec.kinds})

    def spec(self, stream: str) -> StreamSpec:
        """Stream by its short name, such as `samples`; raises BusError for another word."""
        spec = self.streams.get(stream)
        if spec is None:
            raise BusError(f"expected one of the streams {', '.join(self.streams)}, got {stream!r}", stream=stream)
        return spec

    def readable(self, stream: str) -> StreamSpec:
        """Like `spec`, but refuses the work queue, whose messages are claimed and not read."""
        spec = self.spec(stream)
        if spec.queue:
            raise BusError(
                f"stream {stream!r} is a queue and cannot be read",
                hint="claim its messages, or fetch one by its sequence",
                stream=stream,
                queue=True,
            )
        return spec

    def stream_of(self, subject: str) -> StreamSpec:
        """Stream that stores a subject; raises SchemaError for one of another run or of no known kind."""
        spec = self.by_kind.get(kind_of(subject)) if subject.startswith(self.run + ".") else None
        if spec is None or not all(subject.split(".")):
            raise SchemaError(
                f"expected a subject `{self.run}.<kind>[.<source>]` with a kind of {', '.join(sorted(self.by_kind))}, got {subject!r}",
                hint="build subjects with streamrl.schemas.subjects.Subjects",
            )
        return spec

    def subjects_of(self, spec: StreamSpec) -> list[str]:
        """Subjects that a stream listens to, in NATS's notation."""
        return [f"{self.run}.{kind}{tail}" for kind in spec.kinds for tail in ("", ".*")]

    def claimed_subject(self, stream: str, source: str) -> str:
        """Subject of the messages of one source in a queue; raises BusError where the stream is none."""
        if not self.spec(stream).queue:
            raise BusError(f"stream {stream!r} is no queue: its messages are read, not claimed", stream=stream, queue=False)
        return f"{self.run}.{stream}.{check_name('source', source)}"


def stream_name(run: str, stream: str) -> str:
    """The server's name of a stream; unique, because no short name holds a '-'."""
    return f"{run}-{stream}"


def keys_name(run: str) -> str:
    """Stream behind the run's keys (`nats kv` calls the bucket by the run id)."""
    return f"KV_{run}"


def blobs_name(run: str) -> str:
    """Stream behind the run's blobs (`nats object` calls the bucket by the run id)."""
    return f"OBJ_{run}"


def sample_bucket(run: str) -> str:
    """Bucket of what samples keep beside them; no run is called so, for no run id has a '+'."""
    return f"{run}+samples"


def turn_bucket(run: str) -> str:
    """Bucket of the journals of a gateway's open sessions, likewise."""
    return f"{run}+turns"


def stored_subject(stream: str, subject: str = ">") -> str:
    """Where the server repeats a message once it is stored, with its sequence; `stream` is its name on the server, `>` all subjects."""
    return f"$STORED.{stream}.{subject}"


def check_key(key: str) -> str:
    """Return a key of the key-value store; raises SchemaError unless its parts between slashes are plain names."""
    for part in key.split("/"):
        check_name("key", part)
    return key


def is_key(key: str) -> bool:
    """Tell whether `check_key` takes it; a role may have stored other subjects below those that it may publish to."""
    return all(RUN_ID.fullmatch(part) for part in key.split("/"))


def truncated(stream: str, needed: int, first: int) -> LogTruncated:
    """What a reader is told that needs a message of which only later ones are there, from `first` on."""
    return LogTruncated(
        f"stream {stream}: expected message {needed} next, got {first}: the messages between were removed",
        hint="start from a newer checkpoint, or keep more with a larger byte budget",
        stream=stream,
        needed=needed,
        first=first,
    )


def check_headers(headers: Mapping[str, str] | None) -> None:
    """Raise SchemaError for headers that the wire cannot carry or that belong to the server."""
    for name, value in (headers or {}).items():
        if not HEADER_NAME.fullmatch(name) or name.startswith("Nats-") or CONTROL.search(value):
            raise SchemaError(
                f"expected a header name of letters, digits and '-' that does not begin with 'Nats-' and a value of one line, "
                f"got {name!r}: {value!r}"
            )


def check_ttl(ttl_s: float) -> int:
    """Time to live in whole seconds; raises SchemaError below 1 or between two."""
    if ttl_s < 1 or ttl_s != int(ttl_s):
        raise SchemaError(f"a key's ttl_s must be a whole number of seconds, at least 1, got {ttl_s!r}")
    return int(ttl_s)


def message_bytes(body: bytes | memoryview, headers: Mapping[str, str]) -> int:
    """Size of a message on the wire, without its subject."""
    return len(body) + 14 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())


def check_size(subject: str, size: int, max_payload: int) -> None:
    """Raise BusError unless a message of `size` bytes, headers included, can be sent."""
    limit = max_payload - PAYLOAD_ROOM_BYTES
    if size > limit:
        raise BusError(
            f"a message to {subject} may have {limit} bytes with its headers, got {size}",
            hint="put large payloads into a blob and send its name, or raise the server's max_payload",
            subject=subject,
            size=size,
        )
