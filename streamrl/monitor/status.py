"""`streamrl status`: one look at a run from another process."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from streamrl.bus.reading import read_key
from streamrl.errors import BusUnavailable, ConfigError
from streamrl.monitor.accounting import devices_of
from streamrl.monitor.board import Board
from streamrl.monitor.drawing import ink_of
from streamrl.monitor.failed_share import failed_rollouts_line, line_of_numbers
from streamrl.monitor.failures import MOST_CHARS
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.glance import account_words, judged
from streamrl.monitor.look import Look
from streamrl.monitor.numbers import RunNumbers
from streamrl.monitor.run_state import INTERRUPTED, PREPARING, RUNNING, read_state
from streamrl.monitor.screen import clock, degraded_lines, one_line, plain_line, say
from streamrl.monitor.slo import line_of
from streamrl.monitor.summary import Summary, read_summary
from streamrl.monitor.view import RunView
from streamrl.monitor.waits import graders_line, hung_line, standing_line
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import RunDir, known_runs
from streamrl.runtime.worker import connected
from streamrl.schemas.control import Latest
from streamrl.schemas.subjects import KEY_LATEST
from streamrl.trainers.checkpoints import list_checkpoints

ONE_LOGIN = (
    "roles are not separated: all workers share one login of the cluster; bus.user with {role} gives each its own (docs/security.md)"
)
_RATE_LOOK_S = 1.2
"""Long enough for two samples of the totals, which a rate needs."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the list."""

    run: str
    path: str
    state: str
    """`preparing`, `running`, `finished`, `stopped` (drained), `failed`, `interrupted` (killed), or that it cannot be read."""
    supervisor: int | None
    step: int | None = None
    """Batches of reinforcement learning so far; None: not known."""
    steps: int = 0
    """Where it ends; 0: not known."""
    error: str = ""
    """Why it failed."""
    summary: Summary | None
    """Of the last time it stopped."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One run in detail. `numbers` is None unless its bus answers."""

    line: RunLine
    numbers: RunNumbers | None
    checkpoints: tuple[str, ...] = ()
    """Versions that a restart can go back to, the newest first; while its bus does not answer, those whose files are there."""
    one_login: bool = False
    """Whether all roles share one login of an existing cluster: nothing keeps them apart."""


def list_runs(base: str | Path) -> list[RunLine]:
    """All runs under `base`, the most recently started first."""
    return [_described(run) for run in known_runs(base, begun=True)]


def _described(run: RunDir) -> RunLine:
    try:
        return describe(run)
    except ConfigError as error:
        cause = error.__cause__
        why = cause.strerror if isinstance(cause, OSError) else error.message
        return RunLine(run=_shown(run.name), path=_shown(str(run.path)), state=f"cannot be read: {why}", supervisor=None, summary=None)


def _shown(name: str) -> str:
    """A name as it can be printed; a file system's may hold bytes that are no text."""
    return os.fsencode(name).decode(errors="replace")


def describe(run: RunDir) -> RunLine:
    """What the run directory alone says."""
    prepared, found = run.exists, holder(run)
    last, summary = read_state(run), read_summary(run.summary_path)
    if found is not None:
        state = RUNNING if prepared else PREPARING
    elif not prepared:
        state = INTERRUPTED
    elif last is None:
        state = "stopped"
    else:
        state = INTERRUPTED if last.state == RUNNING else last.state
    step = last.step if last is not None else summary.steps if summary is not None else None
    return RunLine(
        run=_shown(run.name),
        path=_shown(str(run.path)),
        state=state,
        supervisor=None if found is None else found.pid,
        step=step,
        steps=last.steps if last is not None else 0,
        error=last.error if last is not None and state == "failed" else "",
        summary=summary,
    )


async def read_status(run: RunDir) -> RunStatus:
    """A run in detail; takes a little over a second when it is running."""
    line = describe(run)
    config = run.load_config()
    trainer = config.trainer.name
    on_disk = tuple(str(version) for version, _ in reversed(list_checkpoints(run.checkpoints, f"{trainer}-")))
    one_login = bool(config.bus.url) and not config.bus.by_role
    if line.supervisor is None and not config.bus.url:
        return RunStatus(line=line, numbers=None, checkpoints=on_disk)
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
                return RunStatus(line=line, numbers=numbers, checkpoints=kept, one_login=one_login)
    except BusUnavailable:
        return RunStatus(line=line, numbers=None, checkpoints=on_disk, one_login=one_login)


def print_runs(lines: Sequence[RunLine], *, as_json: bool) -> None:
    """The list, to stdout."""
    if as_json:
        _print_json(lines)
        return
    if not lines:
        print("there are no runs yet; `streamrl up my.toml` starts one")
        return
    from rich.console import Console  # who only looks at a run need not load it
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2))
    for title in ("run", "state", "steps", "reward", "directory"):
        table.add_column(title, overflow="fold")
    for line in lines:
        last = line.summary
        reward = f"{last.reward_last:.3f}" if last and last.reward_last is not None else "-"
        table.add_row(*(Text(cell) for cell in (line.run, line.state, steps_text(line), reward, line.path)))
    Console().print(table)


def print_status(status: RunStatus, *, as_json: bool) -> None:
    """One run, to stdout."""
    line, numbers = status.line, status.numbers
    if as_json:
        _print_json(status)
    elif numbers is None:
        away = f" (supervisor {line.supervisor}); its bus does not answer" if line.supervisor else f", {steps_text(line)} steps"
        say(f"run {line.run} is {line.state}{away}", sys.stdout)
        if line.error:
            say(one_line(line.error, most=MOST_CHARS), sys.stdout)
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
        if numbers.standing:
            say(standing_line(numbers.standing), sys.stdout)
        for one in numbers.slo:
            say(line_of(one), sys.stdout)
    if status.checkpoints and not as_json:
        print(f"checkpoints: {', '.join(status.checkpoints)}; a restart can go back to {status.checkpoints[-1]}")
    if status.one_login and not as_json:
        print(ONE_LOGIN)


def _look(line: RunLine, numbers: RunNumbers) -> Look:
    return Look(run=line.run, state=line.state, numbers=numbers, now_s=time.time(), summary=line.summary)


def steps_text(line: RunLine) -> str:
    """Batches done, and of how many where that is known."""
    if line.step is None:
        return "-"
    return f"{line.step}/{line.steps}" if line.steps else str(line.step)


def since(began_s: float) -> str:
    """How long ago that was, in words; empty if it is not known."""
    return f" ({clock(max(0.0, time.time() - began_s))})" if began_s else ""


def _print_json(value: object) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
