"""What the plugin inside SGLang and our worker say to each other: MessagePack structs in frames, over one unix socket per rank.

A frame is its length (4 bytes, little-endian) and that many bytes. Every request gets one reply; a request that fails gets `Failed`.
Nothing here imports torch or sglang, and nothing is ever unpickled.
"""

from __future__ import annotations

import struct

import msgspec

from streamrl.errors import SchemaError
from streamrl.schemas.versions import Version
from streamrl.weights.protocol import CudaSource, FileSource

PLUGIN_ENV = "STREAMRL_PLUGIN"
"""Environment variable with a `Settings` as JSON; without it the plugin does nothing."""
EPOCH_KEY = "streamrl_epoch"
NUMBER_KEY = "streamrl_number"
"""Keys of `POST /set_internal_state` that commit a version (SGLang takes numbers only)."""
COPY_KEY = "streamrl_copy"
"""Key beside them, with 1: where a commit would flip, copy into the served buffer all the same (the benchmark compares both)."""
VERSIONS_KEY = "streamrl_versions"
"""Key of `meta_info`: the stamp of the version that sampled each output token; -1 before the first commit."""
UNSTAMPED = -1
_EPOCH_BITS = 32
MAX_FRAME = 1 << 30

_LENGTH = struct.Struct("<I")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the plugin is to do."""

    dir: str
    """Folder (mode 0700) of the sockets `rank-<r>.sock`."""
    swap: str = "auto"
    """`flip`: two buffers, two graph sets, a commit flips pointers. `copy`: a second buffer on the device, copied into place between two
    forward passes. `copy_pinned`: the same from pinned host memory. `auto`: `flip` if a second buffer fits, else `copy_pinned`."""
    isolate: bool = True
    """Told to the client only: requests carry the version as their prefix cache's key."""
    record: bool = False
    """Keep an event of every forward pass for `Forwards`."""
    reserve: float = 0.05
    """`auto`: part of the device's memory that must stay free for the KV cache beside two buffers."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a version, as in its manifest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """First byte in the concatenation."""
    nbytes: int


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Elements of one tensor that a rank holds: `rows` rows of `cols` consecutive elements, `stride` elements apart."""

    tensor: int
    """Index into the prepared tensors."""
    start: int
    rows: int
    cols: int
    stride: int


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How fast to stage."""

    max_gap_ms: float = 0.0
    """At most so many milliseconds of the GPU's time beside one forward pass: what an update can add to a token's gap; 0: no bound."""


class Hello(msgspec.Struct, frozen=True, tag="hello", tag_field="op"):
    """Who is there? Answered by `Rank`."""


class Prepare(msgspec.Struct, frozen=True, kw_only=True, tag="prepare", tag_field="op"):
    """Learn how versions with these tensors are laid out. Answered by `Prepared`; done once for a layout, before any traffic."""

    layout: str
    tensors: tuple[TensorEntry, ...]


class Stage(msgspec.Struct, frozen=True, kw_only=True, tag="stage", tag_field="op"):
    """Copy a version into the idle buffer. Answered by `Staged` when the copy is complete and the source is not read any more."""

    version: Version
    layout: str
    source: FileSource | CudaSource
    pace: Pace = Pace()
    verify: bool = True
    """Digest what was written."""
    words: bool = False
    """By words of 8 bytes instead of elements; only where all ranks are prepared for it."""


class Commits(msgspec.Struct, frozen=True, tag="commits", tag_field="op"):
    """Which commits were asked for after the `after`-th (0: all kept)? Answered by `CommitLog`."""

    after: int = 0


class Forwards(msgspec.Struct, frozen=True, tag="forwards", tag_field="op"):
    """Forward passes since the last such request. Answered by `ForwardLog`."""


class ServedDigest(msgspec.Struct, frozen=True, tag="served_digest", tag_field="op"):
    """Digest what is being served, anew. Answered by `Served`."""

    layout: str


Request = Hello | Prepare | Stage | Commits | Forwards | ServedDigest


class Rank(msgspec.Struct, frozen=True, kw_only=True, tag="rank", tag_field="op"):
    """One tensor-parallel rank and how it swaps."""

    rank: int
    size: int
    pid: int
    device: str
    sglang: str
    swap: str
    """`flip`, `copy`, `copy_pinned`, or `none`: this model's weights cannot be changed here."""
    why: str
    """Why it swaps that way."""
    buffer_nbytes: int
    graphs: tuple[str, ...] = ()
    """Graph sets that were captured twice: `decode`, `prefill`."""
    graphs_s: float = 0.0
    graphs_nbytes: int = 0
    serving: Version | None = None
    isolate: bool = True


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared", tag_field="op"):
    """How a layout's tensors reach this rank's parameters."""

    recorded: bool
    """True: versions are copied by a recorded plan. False: the model's load_weights runs each time."""
    why: str
    regions: tuple[Region, ...]
    """What this rank digests, in the order of `Staged.digests`."""
    ignored: tuple[str, ...]
    """Tensors that the model does not take (an output head that is tied to the embeddings)."""
    took_s: float
    words: bool = False
    """All regions are whole words of 8 bytes, here and in their tensors: it can digest by words."""


class Staged(msgspec.Struct, frozen=True, kw_only=True, tag="staged", tag_field="op"):
    """A `Stage` request is done."""

    version: Version
    took_ms: float
    nbytes: int
    """Bytes written to this rank's parameters."""
    digests: tuple[int, ...] = ()
    """Partial digest of each region (streamrl.tensors.digest), if asked to verify."""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """What one commit request did on this rank."""

    index: int
    """Counts commit requests from 1."""
    version: Version
    committed: bool
    reason: str
    """Why not, if not."""
    forward: int
    """Forward passes launched before; the next one is the first with the version."""
    host_ms: float
    at_s: float
    """time.monotonic() of the host."""
    device_ms: float | None = None
    """Time the copy took on the device (copy modes on a GPU), once it is known."""


class CommitLog(msgspec.Struct, frozen=True, kw_only=True, tag="commit_log", tag_field="op"):
    """The newest commit requests, oldest first."""

    serving: Version | None
    staged: Version | None
    commits: tuple[Committed, ...]


class Forward(msgspec.Struct, frozen=True, array_like=True):
    """One forward pass."""

    index: int
    launched_s: float
    """time.monotonic() when it was launched."""
    done_ms: float
    """When it was done, in milliseconds since the first recorded one: by an event on the device, by the clock on a CPU."""
    batch: int
    """Requests in it."""
    extend: bool
    """It processed prompts."""
    version: int


class ForwardLog(msgspec.Struct, frozen=True, kw_only=True, tag="forward_log", tag_field="op"):
    """Recorded forward passes, oldest first."""

    forwards: tuple[Forward, ...]


class Served(msgspec.Struct, frozen=True, kw_only=True, tag="served", tag_field="op"):
    """Partial digests of what is served, by region."""

    version: Version | None
    digests: tuple[int, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed", tag_field="op"):
    """The request was refused or failed; the serving weights are as before."""

    message: str
    hint: str = ""
    trace: str = ""


Reply = Rank | Prepared | Staged | CommitLog | ForwardLog | Served | Failed

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def stamp_of(version: Version) -> int:
    """A version as one integer that any JSON can hold: its number, with the epoch above 32 bits."""
    return (version.epoch << _EPOCH_BITS) | version.number


def version_of(stamp: int) -> Version:
    """The version of a stamp; raises SchemaError for that of no version."""
    return Version(stamp >> _EPOCH_BITS, stamp & ((1 << _EPOCH_BITS) - 1))


def frame(message: Request | Reply) -> bytes:
    """The message with its length in front.

    Raises:
        SchemaError: it is too long for a frame.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise SchemaError(f"expected a message of at most {MAX_FRAME} bytes, got {len(body)} of {type(message).__name__}")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes that follow a frame's first four.

    Raises:
        SchemaError: more than a frame may have.
    """
    (length,) = _LENGTH.unpack(header)
    if length > MAX_FRAME:
        raise SchemaError(f"expected a frame of at most {MAX_FRAME} bytes, got {length}")
    return length


def decode_request(body: bytes) -> Request:
    """Read a request; raises SchemaError on anything else."""
    try:
        return _requests.decode(body)
    except msgspec.DecodeError as error:
        raise SchemaError(f"expected a request to the plugin, got something else: {error}") from error


def decode_reply(body: bytes) -> Reply:
    """Read a reply; raises SchemaError on anything else."""
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:
        raise SchemaError(f"expected a reply of the plugin, got something else: {error}") from error


def socket_path(directory: str, rank: int) -> str:
    """Where a rank listens."""
    return f"{directory}/rank-{rank}.sock"
