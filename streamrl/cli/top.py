"""`top`: a run on a screen."""

from __future__ import annotations

import argparse
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    top = verbs.add_parser("top", help="show a run on a screen: engines, workers, lag, drops, samples; q quits")
    top.add_argument("run", metavar="RUN", help="name or directory of the run")
    top.add_argument("--once", action="store_true", help="print it once")
    top.add_argument("--json", action="store_true", help="print it once, as JSON")
    top.add_argument("--dir", default="runs", help="directory that holds the runs")
    top.set_defaults(run_verb=run_top)


def run_top(arguments: argparse.Namespace) -> int:
    """Show the run until `q` is pressed."""
    from streamrl.monitor.top import top
    from streamrl.runtime.rundir import RunDir

    top(RunDir.find(arguments.run, base=arguments.dir), once=arguments.once, as_json=arguments.json)
    return 0
