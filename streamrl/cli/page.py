"""`page`: a run in a browser."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import sys
from typing import Any

from streamrl.errors import LaunchError


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    page = verbs.add_parser("page", help="show a run in a browser, while it is up and when it is over")
    page.add_argument("run", metavar="RUN", help="name or directory of the run")
    page.add_argument("--port", type=_port, default=0, metavar="PORT", help="on 127.0.0.1; 0: the one it had before, or any free one")
    page.add_argument("--dir", default="runs", help="directory that holds the runs")
    page.set_defaults(run_verb=run_page)


def run_page(arguments: argparse.Namespace) -> int:
    """Serve the page of a run until Ctrl-C, or say where it is served already."""
    from streamrl.page.address import address_of
    from streamrl.page.serving import serve
    from streamrl.runtime.beats import Pulse
    from streamrl.runtime.rundir import RunDir
    from streamrl.runtime.service import STACKS_SIGNAL, SUPERVISOR_VARIABLE, die_with_parent
    from streamrl.telemetry.logs import configure_logging

    supervisor = int(os.environ.get(SUPERVISOR_VARIABLE, "0"))
    pulse = Pulse.of(os.environ)
    if supervisor:
        die_with_parent(supervisor)
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        os.nice(10)  # the run comes first
    run = RunDir.find(arguments.run, base=arguments.dir)
    try:
        configure_logging("page", file=None if supervisor else run.log_path("page"), stderr=bool(supervisor))
    except OSError:  # a copy of a run without its logs
        configure_logging("page")

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        asyncio.run(serve(run, port=arguments.port, say=say, supervised=bool(supervisor), pulse=pulse))
    except LaunchError:
        known = address_of(run)
        if supervisor or not known or arguments.port:
            raise
        print(f"the page of run {run.name} is served already:\n{known}")
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)
