"""What a benchmark writes down while it runs. All times `*_s` are seconds of the host's monotonic clock, equal in all processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.raw import Header, read_records
from benchmarks.report import Check
from benchmarks.weights.options import Options
from streamrl.errors import DataError

T = TypeVar("T")
Floats = npt.NDArray[np.float64]


class WindowRecord(msgspec.Struct, frozen=True, kw_only=True, tag="window"):
    """A window as it happened."""

    mode: str
    title: str
    every_s: float
    start_s: float
    end_s: float


class UpdateRecord(msgspec.Struct, frozen=True, kw_only=True, tag="update"):
    """One new version on its way into the engine."""

    window: int
    """Index of its window; -1 for the updates of the checks before the first one."""
    mode: str
    version: str
    publish_s: float
    """The trainer hands its weights over."""
    released_s: float
    """The trainer may write to its weights again."""
    announced_s: float
    """The manifest is complete."""
    staged_s: float
    """All ranks have it in the idle buffer, digests compared (ours); the pause is confirmed (stock)."""
    commit_s: float
    """The last rank serves it (ours); generation is continued (stock)."""
    done_s: float
    """The caller knows."""
    stage_ms: list[float] = []
    """Of each rank, as measured there."""
    commit_ms: list[float] = []
    """Host time of each rank's commit."""
    device_ms: list[float] = []
    """Of each rank, where a commit copies: time of the copy on the device."""
    nbytes: list[int] = []
    """Bytes moved to each rank."""
    forwards: list[int] = []
    """Of each rank: the number of the forward pass that the commit preceded."""
    manifest_digest: str = ""
    served_digest: list[str] = []
    """Recomputed from what each rank serves, where it was asked for."""
    error: str = ""


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One request of the load that ended."""

    lane: int
    start_s: float
    end_s: float
    asked: int
    made: int
    finish: str
    retractions: int
    versions: list[tuple[int, int]] = []
    """Runs of (version number, tokens) in order."""
    error: str = ""


class Forwards(msgspec.Struct, frozen=True, kw_only=True, tag="forwards"):
    """The forward passes of one rank, in order. All arrays [n]."""

    host_s: Floats
    """When the host began to launch it."""
    gpu_ms: Floats
    """End of the pass by CUDA events, from an origin of the rank's own (on a CPU: of the host's clock)."""
    rows: npt.NDArray[np.int64]
    """Requests in the batch; each of them got one token."""
    extend: npt.NDArray[np.bool_]
    """A prefill (of new requests) rather than a decode."""
    version: npt.NDArray[np.int64]


class Tokens(msgspec.Struct, frozen=True, kw_only=True, tag="tokens"):
    """Chunks that streaming clients received, in order of arrival. All arrays [n]."""

    lane: npt.NDArray[np.int64]
    request: npt.NDArray[np.int64]
    """Number of the request in its lane."""
    at_s: Floats
    count: npt.NDArray[np.int64]
    """New tokens in the chunk."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, tag="run"):
    """The facts of one run."""

    nbytes: int
    """Bytes of a version."""
    num_tensors: int
    device: str
    """Name of the engine's GPU, or `CPU`."""
    num_devices: int
    transport: str
    sglang: str
    start_server_s: float
    hello: list[dict[str, Any]]
    """What each rank said of itself when the load began."""
    windows: list[WindowRecord]
    checks: list[Check]
    gpu_memory: list[dict[str, Any]] = []
    """At each `moment`: used bytes of every GPU (`cuda:0`, ...), by all processes."""


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """The raw file of one run."""

    header: Header
    run: RunRecord
    updates: list[UpdateRecord]
    requests: list[RequestRecord]
    forwards: list[Forwards]
    """Of each rank."""
    tokens: Tokens

    @property
    def options(self) -> Options:
        """What was asked for."""
        return msgspec.convert(self.header.spec, Options)


def read_raw(out: Path) -> Raw:
    """Read a run's file. Raises DataError when it is missing, broken, or lacks a part."""
    header, found = read_records(out, "weights", RunRecord | UpdateRecord | RequestRecord | Forwards | Tokens)

    def of(kind: type[T]) -> list[T]:
        return [record for record in found if isinstance(record, kind)]

    runs, tokens, forwards = of(RunRecord), of(Tokens), of(Forwards)
    if len(runs) != 1 or len(tokens) != 1 or not forwards:
        raise DataError(
            f"expected one run, its tokens and its forward passes in {out}, got {len(runs)}, {len(tokens)} and {len(forwards)}",
            hint="the benchmark was ended before it had written them",
            counts=(len(runs), len(tokens), len(forwards)),
        )
    return Raw(header=header, run=runs[0], updates=of(UpdateRecord), requests=of(RequestRecord), forwards=forwards, tokens=tokens[0])
