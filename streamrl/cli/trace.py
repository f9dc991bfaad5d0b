"""`trace`: what became of one task, or a window of the whole run as a picture in time."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from streamrl.history.trace_life import Life

_PLACE = re.compile(r"(\d{1,18})(?:/(\d{1,9}))?")


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    trace = verbs.add_parser("trace", help="tell the life of one task from the run's log")
    trace.add_argument("run", metavar="RUN|DIR", help="name or directory of the run, up or not (RUN:TAP for a tap), or a recording of one")
    trace.add_argument("task", metavar="TASK[/ROLLOUT]", help="task index, and one rollout of its group; both count from 0")
    trace.add_argument("--json", action="store_true", help="print JSON")
    trace.add_argument("--dir", default="runs", help="directory that holds the runs")
    trace.set_defaults(run_verb=run_trace)


def run_trace(arguments: argparse.Namespace) -> int:
    """Print a task's life."""
    import msgspec

    from streamrl.history.trace_text import life_text

    task, rollout = parse_place(arguments.task)
    life = asyncio.run(_trace(arguments, task, rollout))
    print(msgspec.json.format(msgspec.json.encode(life), indent=2).decode() if arguments.json else life_text(life))
    return 0


def parse_place(text: str) -> tuple[int, int | None]:
    """(task, rollout) of `TASK[/ROLLOUT]`; raises ConfigError."""
    found = _PLACE.fullmatch(text)
    if found is None:
        raise ConfigError(f"expected TASK or TASK/ROLLOUT, two whole numbers of at least 0, got {text!r}", hint="for example 41, or 41/3")
    return int(found[1]), None if found[2] is None else int(found[2])


def say(text: str) -> None:
    """How far a long reading is, for people who wait; on stderr."""
    print(text, file=sys.stderr, flush=True)


async def _trace(arguments: argparse.Namespace, task: int, rollout: int | None) -> Life:
    from streamrl.history.trace_find import TaskFinder
    from streamrl.history.trace_source import open_trace
    from streamrl.history.trace_task import life_of

    async with open_trace(arguments.run, base=Path(arguments.dir)) as source:
        finder = TaskFinder(source.log, source.bus, source.subjects, source.trainer, say=say)
        await finder.check_issued(task)
        life = life_of(await finder.find(task), source.subjects.run, group_size=source.config.tasks.num_rollouts, rollout=rollout)
    if rollout is not None and rollout >= life.group_size:
        raise ConfigError(f"expected a rollout from 0 to {life.group_size - 1} of task {task}, got {rollout}", hint="count from 0")
    return life
