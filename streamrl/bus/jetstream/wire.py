"""What JetStream's API says in JSON and in reply subjects, and which of our errors its refusals are."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

import msgspec

from streamrl.errors import BusError, Conflict, NotFound, StreamFull

T = TypeVar("T")

HEADER_ID = "Nats-Msg-Id"
HEADER_EXPECT_LAST = "Nats-Expected-Last-Sequence"
HEADER_EXPECT_SUBJECT_LAST = "Nats-Expected-Last-Subject-Sequence"
HEADER_TTL = "Nats-TTL"
STATUS = "Status"
DESCRIPTION = "Description"
STREAM = "Nats-Stream"
SUBJECT = "Nats-Subject"
SEQUENCE = "Nats-Sequence"
LAST_SEQUENCE = "Nats-Last-Sequence"
PENDING = "Nats-Num-Pending"

IN_PROCESS = 10158
"""Error code of a server of a cluster: it has this message from an earlier attempt, and its copies are not all stored yet."""
_NO_LEADER = (10008, 10009)
"""Error codes of servers of a cluster that choose who leads it or a stream."""
_NANOSECOND = 1e-9
_LAST = re.compile(r"wrong last sequence: (\d+)")


class Refusal(msgspec.Struct, frozen=True):
    """An `error` object of the API."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class Refused(msgspec.Struct, frozen=True):
    """What a refusal has in common with every other answer of the API."""

    error: Refusal | None = None


class PubAck(msgspec.Struct, frozen=True):
    """Answer to a publish."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: Refusal | None = None


class StreamStateReply(msgspec.Struct, frozen=True):
    """Part of a stream's description."""

    first_seq: int = 0
    last_seq: int = 0
    bytes: int = 0
    messages: int = 0
    subjects: dict[str, int] = {}


class StreamInfoReply(msgspec.Struct, frozen=True):
    """Answer to STREAM.INFO, CREATE and UPDATE."""

    created: str = ""
    ts: str = ""
    """When the server answered, by its clock."""
    config: dict[str, Any] = {}
    state: StreamStateReply = StreamStateReply()
    total: int = 0
    error: Refusal | None = None


class ConsumerReply(msgspec.Struct, frozen=True):
    """Answer to CONSUMER.CREATE and INFO."""

    config: dict[str, Any] = {}
    error: Refusal | None = None


class Simple(msgspec.Struct, frozen=True):
    """Answer to a purge or a deletion."""

    success: bool = False
    error: Refusal | None = None


class StoredMessage(msgspec.Struct, frozen=True):
    """`message` of STREAM.MSG.GET; `hdrs` is the raw header block."""

    subject: str
    seq: int
    time: str = ""
    hdrs: bytes = b""
    data: bytes = b""

    def headers(self) -> dict[str, str]:
        """Header block as a mapping."""
        pairs = (line.partition(":") for line in self.hdrs.decode("utf-8", "replace").split("\r\n")[1:] if line)
        return {name.strip(): value.strip() for name, _, value in pairs}


class StoredMessageReply(msgspec.Struct, frozen=True):
    """Answer to STREAM.MSG.GET."""

    message: StoredMessage | None = None
    error: Refusal | None = None


class Stored(NamedTuple):
    """A message of a stream as DIRECT.GET answers with it and as the server repeats it once it is stored.

    Its writer's headers stand in front of the server's, of which the last of a name counts: a writer cannot forge them.
    """

    subject: str
    sequence: int
    data: bytes
    headers: Mapping[str, str]
    previous: int
    """Of a repeated message: the sequence of the one before it on the same subject."""

    @property
    def time_s(self) -> float:
        """Unix seconds at which it was stored."""
        return unix_seconds(self.headers.get("Nats-Time-Stamp", ""))


def stored(stream: str, data: bytes, headers: Mapping[str, str] | None) -> Stored | None:
    """A message of `stream`; None for anything else that may come to its reader, such as a status or a message of another stream."""
    if not headers or headers.get(STREAM) != stream or SUBJECT not in headers or not headers.get(SEQUENCE, "").isdigit():
        return None
    previous = headers.get(LAST_SEQUENCE, "")
    return Stored(headers[SUBJECT], int(headers[SEQUENCE]), data, headers, int(previous) if previous.isdigit() else 0)


def asked_too_early(refusal: Refusal | None) -> bool:
    """Whether the same request finds an answer once a cluster has chosen a leader, or stored what it was sent before."""
    return refusal is not None and refusal.err_code in (IN_PROCESS, *_NO_LEADER)


def nobody_leads(data: bytes, headers: Mapping[str, str] | None) -> bool:
    """Whether an answer of the API is such a refusal. Stored messages, which may say anything, come with headers."""
    if headers or b'"error"' not in data[:256]:
        return False
    try:
        return asked_too_early(msgspec.json.decode(data, type=Refused).error)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return False  # who asked knows what it should have been


def status_of(headers: Mapping[str, str] | None) -> str:
    """Code of a status; empty for a stored message, whose writer may have called a header that."""
    return headers.get(STATUS, "") if headers and SEQUENCE not in headers else ""


class Delivery(NamedTuple):
    """What the reply subject of a delivered message says."""

    deliveries: int
    stream_sequence: int
    stored_s: float


def decode(data: bytes, kind: type[T]) -> T:
    """JSON answer to a struct; raises BusError when it is something else."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise BusError(
            f"expected a JetStream {kind.__name__}, got {data[:200]!r}: {error}", hint="is this a NATS server of version 2.11 or later?"
        ) from error


def delivery(reply: str) -> Delivery:
    """Read `$JS.ACK.[<domain>.<account>.]<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<ns>.<pending>[.<random>]`."""
    tokens = reply.split(".")
    start = 4 if len(tokens) == 9 else 6
    return Delivery(int(tokens[start]), int(tokens[start + 1]), int(tokens[start + 3]) * _NANOSECOND)


def unix_seconds(text: str) -> float:
    """RFC 3339 time with nanoseconds to Unix seconds; 0.0 when empty."""
    if not text:
        return 0.0
    whole, _, rest = text.rstrip("Z").partition(".")
    nanoseconds = int(rest[:9].ljust(9, "0")) if rest.isdigit() else 0
    # One rounding, of the same number as in a delivered message's reply subject: recordings have this value.
    return (int(datetime.fromisoformat(whole + "+00:00").timestamp()) * 10**9 + nanoseconds) * _NANOSECOND


def own_headers(headers: Mapping[str, str] | None) -> dict[str, str]:
    """Headers without those that belong to the server."""
    return {name: value for name, value in headers.items() if not name.startswith("Nats-")} if headers else {}


def blob_token(name: str) -> str:
    """Blob name as one subject token (URL-safe base64, as the object-store layout has it)."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def blob_name(token: str) -> str:
    """Inverse of `blob_token`."""
    return base64.urlsafe_b64decode(token.encode()).decode()


def error_of(refusal: Refusal, *, doing: str, expected: int | None = None) -> BusError:
    """The error that a refusal of the API means.

    Args:
        refusal: the API's error object.
        doing: what was asked, with the place: `publish to run.samples.main`.
        expected: the sequence that a compare-and-set expected.
    """
    text = refusal.description
    if refusal.err_code in (10071, 10164):
        match = _LAST.search(text)
        values = {"expected": expected, "actual": int(match[1])} if match else {"expected": expected}
        found = f"{match[1]}" if match else "another one"
        return Conflict(f"{doing}: expected the last sequence {expected}, got {found}", hint="another writer was first", **values)
    if "no space left" in text or refusal.err_code in (10023, 10047):
        return StreamFull(
            f"{doing}: the server has no room: {text}",
            hint="free disk space for the server's store, or lower bus.samples_bytes, bus.blobs_bytes and bus.sample_blobs_bytes",
            server=True,
        )
    if refusal.err_code == 10077 or "maximum bytes exceeded" in text or "maximum messages exceeded" in text:
        return StreamFull(f"{doing}: the byte budget is used up ({text})", hint="trim the stream, or raise its budget in [bus]")
    if refusal.err_code in (10054,):
        return BusError(f"{doing}: {text}", hint="put large payloads into a blob and send its name")
    if refusal.code == 404:
        return NotFound(f"{doing}: {text}")
    hints = {
        10039: "enable JetStream for this account on the server",
        10076: "enable JetStream on the server: `jetstream {}` in its configuration",
        10005: "has the cluster as many servers as bus.replicas asks for, with JetStream and room for the byte budgets in [bus]?",
        10058: "a stream of this name exists with other settings: use another run name, or delete it",
        10074: "the server is no cluster: name one in bus.url, or leave bus.replicas out",
        10065: "another stream already listens to these subjects: use another run name",
    }
    return BusError(f"{doing}: {text} (code {refusal.code}, {refusal.err_code})", hint=hints.get(refusal.err_code, ""))
