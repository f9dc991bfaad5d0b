"""`export`: a version of a run as a model directory."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    export = verbs.add_parser("export", help="write a version's policy as a model directory, from a checkpoint or from the bus")
    export.add_argument("run", metavar="RUN", help="name or directory of the run, up or not")
    export.add_argument("--version", metavar="V", help="17 or 0.17; without it the newest that there is")
    export.add_argument("--out", type=Path, metavar="DIR", help="new directory; without it hf/ in the run directory")
    export.add_argument("--dir", default="runs", help="directory that holds the runs")
    export.add_argument("--json", action="store_true", help="print JSON")
    export.set_defaults(run_verb=run_export)


def run_export(arguments: argparse.Namespace) -> int:
    """Export a version."""
    return asyncio.run(_export(arguments))


async def _export(arguments: argparse.Namespace) -> int:
    from streamrl.data.model import ensure_model
    from streamrl.history.export import choose, export, find_versions
    from streamrl.runtime.run_bus import open_bus
    from streamrl.runtime.rundir import RunDir

    run = RunDir.find(arguments.run, base=arguments.dir)
    config = run.load_config()
    async with open_bus(run) as bus:
        found = await find_versions(config, bus, run.checkpoints)
        version = choose(found, arguments.version)
        out = arguments.out or run.export_path(version)
        if arguments.out is None and out.is_dir():
            whence = "there already"  # made by the trainer or an earlier export; it comes whole or not at all
        else:
            whence = await export(config, bus, ensure_model(config, run.model_dir), found, version, out)
    if arguments.json:
        print(json.dumps({"run": run.name, "version": str(version), "from": whence, "path": str(out)}))
    elif whence == "there already":
        print(f"version {version} of {run.name} is {whence}: {out}")
    else:
        print(f"exported version {version} of {run.name} from {whence} into {out}")
    return 0
