"""Where a benchmark's files go."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.errors import ConfigError

RAW = "raw.json"


def new_directory(out: Path) -> Path:
    """Make the directory; raises ConfigError when the files of another run are in it."""
    if (out / RAW).exists():
        raise ConfigError(f"--out: expected a new directory, got {out} with the files of another run", hint="choose another one")
    out.mkdir(parents=True, exist_ok=True)
    return out


def write_report(out: Path, report: msgspec.Struct, text: str) -> None:
    """Write `report.json` and `table.md`."""
    (out / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    (out / "table.md").write_text(text, encoding="utf-8")
