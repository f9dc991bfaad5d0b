"""Rows as one table in a file: CSV, Parquet or JSON lines."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from streamrl.errors import ConfigError
from streamrl.monitor.metrics_file import encoded
from streamrl.monitor.metrics_read import Metrics
from streamrl.monitor.series import Row
from streamrl.telemetry.names import METRICS

_CHUNK_ROWS = 4096
_HEAD = {"time_s": pa.float64(), "kind": pa.string(), "of": pa.string(), "version": pa.string(), "step": pa.int64()}


def export(metrics: Metrics, out: Path) -> int:
    """Write all rows to `out`, whose ending names the format; a column a metric that has a value. Returns the number of rows.

    Raises:
        ConfigError: another ending, a file that is there, a place that cannot be written, or nothing to write.
    """
    write = _WRITERS.get(out.suffix)
    if write is None:
        raise ConfigError(f"expected a file that ends with {', '.join(_WRITERS)}, got {str(out)!r}", hint="the ending names the format")
    if out.exists():
        raise ConfigError(f"expected a file that is not there yet, got {str(out)!r}", hint="remove it, or choose another name")
    names = _names(metrics)
    temporary = out.with_name(f".{out.name}.part")
    try:
        count = write(metrics, names, temporary)
        temporary.rename(out)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}", hint="choose another place") from error
    return count


def _names(metrics: Metrics) -> list[str]:
    found = set[str]()
    for row in metrics.rows():
        found.update(row.values)
    if not found:
        raise ConfigError("the run has no values of these metrics yet", hint="docs/metrics.md says when there are some")
    return [name for name in METRICS if name in found]


def _chunks(metrics: Metrics) -> Iterator[list[Row]]:
    rows = metrics.rows()
    while chunk := list(itertools.islice(rows, _CHUNK_ROWS)):
        yield chunk


def _head(row: Row) -> list[float | str | int]:
    return [row.time_s, row.kind, row.of, row.version, row.step]


def _csv(metrics: Metrics, names: Sequence[str], path: Path) -> int:
    count = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow([*_HEAD, *names])
        for row in metrics.rows():
            table.writerow([*_head(row), *(row.values.get(name, "") for name in names)])
            count += 1
    return count


def _jsonl(metrics: Metrics, names: Sequence[str], path: Path) -> int:
    count = 0
    with path.open("wb") as file:
        for row in metrics.rows():
            file.write(encoded(row))
            count += 1
    return count


def _parquet(metrics: Metrics, names: Sequence[str], path: Path) -> int:
    count = 0
    schema = pa.schema([*_HEAD.items(), *((name, pa.float64()) for name in names)])
    with pq.ParquetWriter(path, schema) as file:
        for rows in _chunks(metrics):
            heads = list(zip(*map(_head, rows), strict=True))
            columns = [pa.array(column, kind) for column, kind in zip(heads, _HEAD.values(), strict=True)]
            columns += [pa.array([row.values.get(name) for row in rows], pa.float64()) for name in names]
            file.write_table(pa.Table.from_arrays(columns, schema=schema))
            count += len(rows)
    return count


_WRITERS: dict[str, Callable[[Metrics, Sequence[str], Path], int]] = {".csv": _csv, ".parquet": _parquet, ".jsonl": _jsonl}
