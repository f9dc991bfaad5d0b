"""`streamrl status`: one look at a run from another process."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time

import msgspec

from streamrl.bus.reading import read_key
from streamrl.errors import BusUnavailable
from streamrl.models.directories import list_checkpoints
from streamrl.monitor.accounting import devices_of
from streamrl.monitor.board import Board
from streamrl.monitor.drawing import ink_of
from streamrl.monitor.failed_share import failed_rollouts_line, line_of_numbers
from streamrl.monitor.failures import MOST_CHARS
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.glance import account_words, judged
from streamrl.monitor.look import Look
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.report import away_text, report_of
from streamrl.monitor.run_state import RunState, read_state
from streamrl.monitor.runs import MOST_NOTE_CHARS, RunLine, describe, steps_text
from streamrl.monitor.screen import clock, degraded_lines, one_line, plain_line, row_line, say
from streamrl.monitor.slo import line_of
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import graders_line, hung_line, standing_line
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.control import Latest
from streamrl.schemas.subjects import KEY_LATEST

ONE_LOGIN = (
    "roles are not separated: all workers share one login of the cluster; bus.user with {role} gives each its own (docs/security.md)"
)
_RATE_LOOK_S = 1.2
"""Long enough for two samples of the totals, which a rate needs."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run in detail."""

    line: RunLine
    numbers: RunNumbers | None
    """None unless its bus answers."""
    last: RunState | None = None
    """The content of `state.json`."""
    checkpoints: tuple[str, ...] = ()
    """Versions that a restart can go back to, the newest first; while its bus does not answer, those whose files are there."""
    one_login: bool = False
    """Whether all roles share one login of an existing cluster: nothing keeps them apart."""


async def read_status(run: RunDir) -> RunStatus:
    """A run in detail; takes a little over a second when it is running. One whose preparation has not ended has no numbers."""
    line, last = describe(run), read_state(run)
    if not run.exists:
        return RunStatus(line=line, numbers=None)
    config = run.load_config()
    trainer = config.trainer.name
    on_disk = tuple(str(version) for version, _ in reversed(list_checkpoints(run.checkpoints, f"{trainer}-")))
    one_login = bool(config.bus.url) and not config.bus.by_role
    if line.parent or (line.supervisor is None and not config.bus.url):  # a branch has no bus
        return RunStatus(line=line, numbers=None, last=last, checkpoints=on_disk)
    try:
        async with connected(run, role="reader", patience_s=5.0) as bus:
            view = RunView(
                run.name,
                steps=config.run.steps,
                warmup_steps=config.warmup.max_steps,
                before=await read_totals(bus),
                joined=True,
                devices=devices_of(config),
            )
            async with Follower(bus, view, trainer=trainer) as follower:
                await follower.catch_up()
                await asyncio.sleep(_RATE_LOOK_S)
                latest = await read_key(bus.kv, f"{KEY_LATEST}/{trainer}", Latest)
                kept = tuple(str(one.version) for one in latest.kept) if latest is not None else ()
                numbers = judged(view, config, elapsed_s=view.before.wall_s)
                return RunStatus(line=line, numbers=numbers, last=last, checkpoints=kept, one_login=one_login)
    except BusUnavailable:
        return RunStatus(line=line, numbers=None, last=last, checkpoints=on_disk, one_login=one_login)


def print_status(status: RunStatus, *, as_json: bool) -> None:
    """One run, to stdout."""
    line, numbers = status.line, status.numbers
    if as_json:
        report = report_of(line, numbers, last=status.last, checkpoints=status.checkpoints, one_login=status.one_login)
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
        return
    if numbers is None:
        away = f"; {away_text(line, None)}" if line.supervisor is not None else ""
        steps = "" if line.step is None else f", {steps_text(line)} steps"
        away = f" (process {line.supervisor}){away}" if line.supervisor else f"{away}{steps}"
        say(f"run {line.run} is {line.state}{away}", sys.stdout)
        if line.error:
            say(one_line(line.error, most=MOST_CHARS), sys.stdout)
        if line.note:
            say(f"note: {one_line(line.note, most=MOST_NOTE_CHARS)}", sys.stdout)
        summary = line.summary
        if summary and (failed := failed_rollouts_line(summary.failed_rollouts, summary.ended_rollouts, summary.newest_error)):
            say(failed, sys.stdout)
        if line.summary:
            print(msgspec.json.format(msgspec.json.encode(line.summary), indent=2).decode())
    elif sys.stdout.isatty():
        print("\n".join(Board(_look(line, numbers), shutil.get_terminal_size().columns, ink_of(sys.stdout)).text()))
    else:
        glance = [numbers.verdict.text if numbers.verdict else "", "; ".join(account_words(numbers.account))]
        for said in (plain_line(numbers), *filter(None, glance), *degraded_lines(numbers)):
            say(said, sys.stdout)
        for worker in numbers.workers:
            failed = f"; {worker.failed_rollouts} rollouts failed lately" if worker.failed_rollouts else ""
            say(f"  {worker.worker}: {worker.state}{since(worker.since_s)}{failed}", sys.stdout)
        if held := hung_line(numbers):
            say(held, sys.stdout)
        if stuck := graders_line(numbers):
            say(stuck, sys.stdout)
        if failed := line_of_numbers(numbers):
            say(failed, sys.stdout)
        elif numbers.newest_error:
            say(f"newest failure: {one_line(numbers.newest_error, most=MOST_CHARS)}", sys.stdout)
        for row in numbers.unusable_rows:
            say(row_line(row), sys.stdout)
        if numbers.standing:
            say(standing_line(numbers.standing), sys.stdout)
        for one in numbers.slo:
            say(line_of(one), sys.stdout)
    if status.checkpoints:
        print(f"checkpoints: {', '.join(status.checkpoints)}; a restart can go back to {status.checkpoints[-1]}")
    if status.one_login:
        print(ONE_LOGIN)


def _look(line: RunLine, numbers: RunNumbers) -> Look:
    return Look(run=line.run, state=line.state, numbers=numbers, now_s=time.time(), summary=line.summary)


def since(began_s: float) -> str:
    """How long ago that was, in words; empty if it is not known."""
    return f" ({clock(max(0.0, time.time() - began_s))})" if began_s else ""
