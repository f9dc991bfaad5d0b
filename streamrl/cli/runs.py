"""`up`, `down`, `status` and `runs`: whole runs."""

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

    runs = verbs.add_parser("runs", help="list runs; remove them, or note what one is for")
    runs.add_argument("--json", action="store_true", help="print JSON")
    runs.set_defaults(run_verb=run_list)
    actions = runs.add_subparsers(title="actions", metavar="ACTION", help="none: list them")
    remove = actions.add_parser("rm", help="remove runs with all that is in their directories")
    remove.add_argument("runs", nargs="+", metavar="RUN", help="name or directory of a run that is not up")
    remove.add_argument("--yes", action="store_true", help="do not ask")
    remove.add_argument("--force", action="store_true", help="also where branches or other runs depend on one")
    remove.set_defaults(run_verb=run_remove)
    note = actions.add_parser("note", help="store words on a run, which the list shows; print them if none are given")
    note.add_argument("run", metavar="RUN", help="name or directory of the run")
    note.add_argument("text", nargs="?", metavar="TEXT", help="the note; an empty one removes it")
    note.set_defaults(run_verb=run_note)
    runs.add_argument("--dir", default="runs", help="directory that holds the runs")
    for action in (remove, note):  # a default here would hide what stands before the action
        action.add_argument("--dir", default=argparse.SUPPRESS, help="directory that holds the runs")


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
        return run_list(arguments)
    run = RunDir.find(arguments.run, base=arguments.dir, begun=True)
    status.print_status(asyncio.run(status.read_status(run)), as_json=arguments.json)
    return 0


def run_list(arguments: argparse.Namespace) -> int:
    """List the runs."""
    from streamrl.monitor.runs import list_runs, print_runs

    print_runs(list_runs(arguments.dir), as_json=arguments.json)
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    """Remove runs, all of them or, where one is refused, none; 1 if that was not confirmed."""
    from streamrl.launch.remove import check_free, removable, remove_run
    from streamrl.monitor.runs import bytes_on_disk, size_text

    chosen = list({run.path: run for run in (removable(text, base=arguments.dir) for text in arguments.runs)}.values())
    if not arguments.force:
        check_free(chosen)
    sizes = [size_text(bytes_on_disk(run.path)) for run in chosen]
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ConfigError("expected --yes, as there is no terminal to ask at", hint="with it the runs are removed at once")
        for run, size in zip(chosen, sizes, strict=True):
            print(f"  {run.path} ({size})")
        if _answer(f"remove {'this run' if len(chosen) == 1 else f'these {len(chosen)} runs'} for ever? [y/N] ") not in ("y", "yes"):
            print("nothing was removed")
            return 1
    for run, size in zip(chosen, sizes, strict=True):
        left = remove_run(run)
        print(f"removed {run.path} ({size}){f'; {left}' if left else ''}")
    return 0


def _answer(question: str) -> str:
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""


def run_note(arguments: argparse.Namespace) -> int:
    """Store a note, or print the one that is there."""
    from streamrl.monitor.drawing import visible_lines
    from streamrl.monitor.runs import read_note, write_note
    from streamrl.runtime.rundir import RunDir

    run = RunDir.find(arguments.run, base=arguments.dir, begun=True)
    if arguments.text is not None:
        write_note(run, arguments.text)
    elif note := read_note(run):
        print(visible_lines(note))
    return 0
