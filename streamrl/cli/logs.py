"""`logs`: what the workers of a run wrote, as one."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from streamrl.errors import ConfigError


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    logs = verbs.add_parser("logs", help="print the logs of a run's workers in order of time")
    logs.add_argument("run", metavar="RUN", help="name or directory of the run")
    logs.add_argument("worker", nargs="?", metavar="WORKER", help="one worker (trainer-0) or one kind (trainer); none: all")
    logs.add_argument("-f", "--follow", action="store_true", help="go on with what comes, until the run is down or Ctrl-C")
    logs.add_argument("-n", "--lines", type=int, metavar="N", help="begin with the last N lines instead of all")
    logs.add_argument("--dir", default="runs", help="directory that holds the runs")
    logs.set_defaults(run_verb=run_logs)


def run_logs(arguments: argparse.Namespace) -> int:
    """Print what is there, and with --follow what comes."""
    from streamrl.monitor.logs import Logs
    from streamrl.runtime.lock import holder
    from streamrl.runtime.rundir import RunDir

    if arguments.lines is not None and arguments.lines < 0:
        raise ConfigError(f"expected --lines of at least 0, got {arguments.lines}", hint="leave it out for all lines")
    run = RunDir.find(arguments.run, base=arguments.dir)
    logs = Logs(run, arguments.worker)
    out = sys.stdout.buffer
    out.writelines(logs.past(last=arguments.lines, to_the_end=not arguments.follow))
    out.flush()
    if arguments.follow:
        for line in logs.follow(lambda: holder(run) is None):
            out.write(line)
            out.flush()
    return 0
