"""Where a benchmark's files go."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from streamrl.errors import ConfigError, DataError

RAW = "raw.json"
T = TypeVar("T")


def new_directory(out: Path) -> Path:
    """Make the directory; raises ConfigError when the files of another run are in it."""
    if (out / RAW).exists():
        raise ConfigError(f"--out: expected a new directory, got {out} with the files of another run", hint="choose another one")
    out.mkdir(parents=True, exist_ok=True)
    return out


def read_raw(out: Path, kind: type[T]) -> T:
    """What a benchmark measured; raises ConfigError when `out` holds no such file."""
    try:
        return msgspec.json.decode((out / RAW).read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"--report: expected the {RAW} of such a benchmark in {out}, got: {error}", hint="name its --out") from error


def write_report(out: Path, report: msgspec.Struct, text: str) -> None:
    """Write `report.json` and `table.md`."""
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    (out / "table.md").write_text(text, encoding="utf-8")


def marks(name: str, reports: str = "DIR") -> tuple[str, str]:
    """The lines of a document between which a benchmark's tables stand; `reports` is what its option --report takes."""
    begin = f"<!-- bench {name}: begin (written by streamrl bench {name} --report {reports} --docs FILE) -->"
    return begin, f"<!-- bench {name}: end -->"


def write_between(document: Path, between: tuple[str, str], text: str) -> None:
    """Put tables between two marks in a document.

    Raises:
        DataError: the document does not have them, in this order.
    """
    begin, end = between
    before, found_begin, rest = document.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found_begin or not found_end:
        raise DataError(f"expected the marks {begin!r} and {end!r} in {document}, got none", hint="add both lines where the table belongs")
    document.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")
