"""The raw files of a benchmark: what was seen, before anything is computed from it.

| file | holds |
|---|---|
| `run.json` | RunRecord |
| `updates.jsonl` | one UpdateRecord a line |
| `requests.jsonl` | one RequestRecord a line |
| `forwards.npz` | Forwards of every rank: `rank0_host_s`, `rank0_gpu_ms`, ... |
| `tokens.npz` | Tokens |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from benchmarks.weights.records import Forwards, RequestRecord, RunRecord, Tokens, UpdateRecord
from streamrl.errors import DataError

_T = TypeVar("_T")


class Raw(msgspec.Struct, frozen=True, kw_only=True):
    """All raw files of one run."""

    run: RunRecord
    updates: list[UpdateRecord]
    requests: list[RequestRecord]
    forwards: list[Forwards]
    """Of each rank."""
    tokens: Tokens


def read_raw(directory: Path) -> Raw:
    """Read a run's files. Raises DataError when one is missing or is not what it should be."""
    try:
        run = msgspec.json.decode((directory / "run.json").read_bytes(), type=RunRecord)
        updates = _read_lines(directory / "updates.jsonl", UpdateRecord)
        requests = _read_lines(directory / "requests.jsonl", RequestRecord)
        forwards = _read_forwards(directory / "forwards.npz")
        tokens = _read_tokens(directory / "tokens.npz")
    except (OSError, msgspec.MsgspecError, KeyError, ValueError) as error:
        raise DataError(
            f"expected the files of a benchmark in {directory}, got: {error}", hint="give the directory that bench weights --out wrote"
        ) from error
    return Raw(run=run, updates=updates, requests=requests, forwards=forwards, tokens=tokens)


def write_run(directory: Path, run: RunRecord) -> None:
    """Write `run.json`."""
    (directory / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(run), indent=1) + b"\n")


def write_updates(directory: Path, updates: Iterable[UpdateRecord]) -> None:
    """Write `updates.jsonl`."""
    _write_lines(directory / "updates.jsonl", updates)


def write_requests(directory: Path, requests: Iterable[RequestRecord]) -> None:
    """Write `requests.jsonl`."""
    _write_lines(directory / "requests.jsonl", requests)


def write_forwards(directory: Path, ranks: Sequence[Forwards]) -> None:
    """Write `forwards.npz`."""
    arrays = {f"rank{rank}_{name}": getattr(one, name) for rank, one in enumerate(ranks) for name in Forwards.__struct_fields__}
    np.savez_compressed(directory / "forwards.npz", **arrays)


def write_tokens(directory: Path, chunks: Sequence[tuple[int, int, float, int]]) -> None:
    """Write `tokens.npz` from (lane, request, at_s, count)."""
    lane, request, at_s, count = zip(*chunks, strict=True) if chunks else ((), (), (), ())
    np.savez_compressed(
        directory / "tokens.npz",
        lane=np.asarray(lane, np.int64),
        request=np.asarray(request, np.int64),
        at_s=np.asarray(at_s, np.float64),
        count=np.asarray(count, np.int64),
    )


def _read_forwards(path: Path) -> list[Forwards]:
    with np.load(path, allow_pickle=False) as file:
        ranks = sorted({int(name.split("_")[0].removeprefix("rank")) for name in file.files})
        return [Forwards(**{name: file[f"rank{rank}_{name}"] for name in Forwards.__struct_fields__}) for rank in ranks]


def _read_tokens(path: Path) -> Tokens:
    with np.load(path, allow_pickle=False) as file:
        return Tokens(**{name: file[name] for name in Tokens.__struct_fields__})


def _read_lines(path: Path, kind: type[_T]) -> list[_T]:
    decoder = msgspec.json.Decoder(kind)
    return [decoder.decode(line) for line in path.read_bytes().splitlines() if line]


def _write_lines(path: Path, records: Iterable[msgspec.Struct]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
