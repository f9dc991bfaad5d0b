"""`streamrl bench engine`: starts the measuring process and writes what it found."""

from __future__ import annotations

import logging
import subprocess
import tempfile
from pathlib import Path

import msgspec

from benchmarks.engine.records import Raw
from benchmarks.engine.report import Report, build_report, render
from benchmarks.engine.spec import Spec
from benchmarks.output import new_directory, read_raw, write_report
from benchmarks.processes import child
from streamrl.config.tree import Config, EngineConfig
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import environment

log = logging.getLogger(__name__)


def run(spec: Spec, out: Path) -> Report:
    """Measure; writes `raw.json`, `report.json` and `table.md` into the new directory `out`.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: the measuring process failed.
    """
    out = new_directory(out)
    # A process of its own, because thread counts must be in the environment before torch is loaded: those of an engine worker.
    threads = environment(Config(engine=EngineConfig(threads=spec.threads)), "engine")
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory:
        asked = Path(directory) / "spec.json"
        asked.write_bytes(msgspec.json.encode(spec))
        command = child("benchmarks.engine.measure", asked, out / "raw.json", env=threads)
        code = subprocess.run(**command, check=False).returncode
    if code != 0:
        raise LaunchError(f"the measuring process: expected exit code 0, got {code}", hint="its error stands above")
    return report_of(out)


def report_of(out: Path) -> Report:
    """Make `report.json` and `table.md` again from the raw file; raises ConfigError when there is none that can be read."""
    report = build_report(read_raw(out, Raw))
    write_report(out, report, render(report))
    return report
