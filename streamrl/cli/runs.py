"""`up`, `down` and `status`: whole runs."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
from typing import Any

from streamrl.cli.numbers import seconds
from streamrl.errors import ConfigError


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    up = verbs.add_parser("up", help="start a run, or resume it, and watch it to its end")
    up.add_argument("config", nargs="?", metavar="TOML", help="configuration file")
    up.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated"
    )
    up.add_argument("--name", help="name of the run (run.name)")
    up.add_argument("--plain", action="store_true", help="lines instead of the board of `streamrl top`")
    up.add_argument("--accept-gap", action="store_true", help="go on although the ledger has lost more than its end")
    up.add_argument("--accept-code", action="store_true", help="go on although the code of the loss has changed since the last start")
    up.add_argument("--accept-model", action="store_true", help="go on although files of a model have changed since the last start")
    up.add_argument("--json", action="store_true", help="print the summary as JSON; everything else goes to stderr")
    up.set_defaults(run_verb=run_up)

    down = verbs.add_parser("down", help="stop a run: it drains, and `up` resumes it")
    down.add_argument("run", metavar="RUN", help="name or directory of the run")
    down.add_argument("--now", action="store_true", help="stop at once, without a last checkpoint")
    down.add_argument("--timeout", dest="timeout_s", type=seconds, default=180.0, metavar="SECONDS", help="how long to wait for it")
    down.add_argument("--dir", default="runs", help="directory that holds the runs")
    down.set_defaults(run_verb=run_down)

    status = verbs.add_parser("status", help="show runs, or one of them in detail")
    status.add_argument("run", nargs="?", metavar="RUN", help="name or directory of the run; none: list all")
    status.add_argument("--json", action="store_true", help="print JSON")
    status.add_argument("--dir", default="runs", help="directory that holds the runs")
    status.set_defaults(run_verb=run_status)


def run_up(arguments: argparse.Namespace) -> int:
    """Start or resume a run and stay with it."""
    from streamrl.config.load import load
    from streamrl.launch.up import Consent, up
    from streamrl.monitor.board_screen import choose_display
    from streamrl.monitor.screen import PlainLines

    if arguments.config is None:
        raise ConfigError(
            "expected the path of a TOML file, got nothing", hint="for example `streamrl up examples/quickstart/quickstart.toml`"
        )
    overrides = [*arguments.overrides, *([] if arguments.name is None else [f"run.name={arguments.name}"])]
    config = load(arguments.config, overrides)
    display = PlainLines(sys.stderr) if arguments.json else choose_display(config, plain=arguments.plain)
    consent = Consent(gap=arguments.accept_gap, code=arguments.accept_code, model=arguments.accept_model)
    outcome = asyncio.run(up(config, display, consent=consent, page=True))
    if arguments.json:
        print(outcome.summary_json)
    else:
        outcome.print()
        if outcome.state in ("stopped", "killed") and outcome.run.exists:
            named = [] if arguments.name is None else ["--name", arguments.name]
            overrides = [word for override in arguments.overrides for word in ("--set", override)]
            print(f"  go on with: {shlex.join(['streamrl', 'up', arguments.config, *named, *overrides])}")
    return outcome.exit_code


def run_down(arguments: argparse.Namespace) -> int:
    """Ask a run's supervisor to stop and wait until it has."""
    from streamrl.launch.down import stop_run
    from streamrl.runtime.rundir import RunDir

    run = RunDir.find(arguments.run, base=arguments.dir, begun=True)
    stopped = stop_run(run, now=arguments.now, timeout_s=arguments.timeout_s)
    print(f"run {run.name} has stopped" if stopped else f"run {run.name} was not running")
    return 0


def run_status(arguments: argparse.Namespace) -> int:
    """List the runs, or show one."""
    from streamrl.monitor import status
    from streamrl.runtime.rundir import RunDir

    if arguments.run is None:
        status.print_runs(status.list_runs(arguments.dir), as_json=arguments.json)
        return 0
    run = RunDir.find(arguments.run, base=arguments.dir)
    status.print_status(asyncio.run(status.read_status(run)), as_json=arguments.json)
    return 0
