"""`trace`: what became of one task, or a window of the whole run as a picture in time."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from streamrl.history.trace import Life

_WINDOW = re.compile(r"([0-9]{1,18})(?:\.\.([0-9]{1,18}))?")
_PLACE = re.compile(r"([0-9]{1,18})(?:/([0-9]{1,9}))?")


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    trace = verbs.add_parser("trace", help="tell the life of one task from the run's log")
    trace.add_argument("run", metavar="RUN|DIR", help="name or directory of the run, up or not (RUN:TAP for a tap), or a recording of one")
    trace.add_argument("task", nargs="?", metavar="TASK[/ROLLOUT]", help="task index, and one rollout of its group; both count from 0")
    trace.add_argument("--window", metavar="FROM..TO", help="instead of a task: the batches that made these versions, for Perfetto")
    trace.add_argument("--out", type=Path, metavar="FILE.json", help="with --window: the file that is written")
    trace.add_argument("--json", action="store_true", help="print JSON")
    trace.add_argument("--dir", default="runs", help="directory that holds the runs")
    trace.set_defaults(run_verb=run_trace)


def run_trace(arguments: argparse.Namespace) -> int:
    """Print a task's life, or write the events of a window."""
    import msgspec

    if (arguments.window is None) == (arguments.task is None) or (arguments.window is None) != (arguments.out is None):
        raise ConfigError("expected TASK[/ROLLOUT], or --window FROM..TO with --out FILE.json", hint="for example 41/3, or --window 3..9")
    if arguments.window is not None:
        first, last = parse_window(arguments.window)
        written = asyncio.run(_write_window(arguments, first, last))
        print(msgspec.json.encode(written).decode() if arguments.json else _window_text(written))
        return 0

    from streamrl.history.trace import life_text

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


def parse_window(text: str) -> tuple[int, int]:
    """The version numbers of `FROM..TO`, or of one version; raises ConfigError."""
    found = _WINDOW.fullmatch(text)
    if found is None:
        raise ConfigError(f"expected --window FROM..TO, numbers of versions, got {text!r}", hint="for example 3..9, or 7 for one")
    return int(found[1]), int(found[2] or found[1])


def say(text: str) -> None:
    """How far a long reading is, for people who wait; on stderr."""
    print(text, file=sys.stderr, flush=True)


async def _trace(arguments: argparse.Namespace, task: int, rollout: int | None) -> Life:
    from streamrl.history.search import TaskFinder
    from streamrl.history.source import open_source
    from streamrl.history.trace import life_of, with_deliveries

    async with open_source(arguments.run, base=arguments.dir, looking=True) as source:
        finder = TaskFinder(source.log, source.bus, source.subjects, source.trainer, say=say)
        await finder.check_issued(task)
        life = life_of(await finder.find(task), source.subjects.run, group_size=source.config.group_size, rollout=rollout)
        life = await with_deliveries(life, source.log)
    if rollout is not None and rollout >= life.group_size:
        raise ConfigError(f"expected a rollout from 0 to {life.group_size - 1} of task {task}, got {rollout}", hint="count from 0")
    return life


async def _write_window(arguments: argparse.Namespace, first: int, last: int) -> dict[str, Any]:
    from streamrl.history.source import open_source
    from streamrl.history.trace_window import WindowEvents, WindowReader

    async with open_source(arguments.run, base=arguments.dir, looking=True) as source:
        reader = WindowReader(source.log, source.subjects, source.trainer, say=say)
        entries = await reader.entries(first, last)
        events = WindowEvents(source.subjects.run)
        for entry in entries:
            events.batch(entry, await reader.arrivals(entry))
        start_s, end_s = events.start / 1e6, events.end / 1e6 + 1.0
        swaps, publications = await reader.swaps(start_s, end_s), await reader.publications(start_s, end_s)
    facts = {"run": source.subjects.run, "first": first, "last": last, "batches": len(entries), "file": str(arguments.out)}
    return facts | {"events": _write(arguments.out, events.events(swaps, publications), facts)}


def _write(path: Path, events: Iterator[dict[str, Any]], facts: dict[str, Any]) -> int:
    """Write the events in place of what was there, all or nothing; returns how many they are."""
    import msgspec

    encode, count, part = msgspec.json.encode, 0, path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with part.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(facts) + b',"traceEvents":[')
            for event in events:
                file.write((b",\n" if count else b"\n") + encode(event))
                count += 1
            file.write(b"\n]}\n")
        part.replace(path)
    except OSError as error:
        raise ConfigError(f"the events cannot be written to {path}: {error.strerror}", hint="choose another file with --out") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _window_text(written: dict[str, Any]) -> str:
    size = Path(written["file"]).stat().st_size
    return (
        f"{written['events']} events of {written['batches']} batches in {written['file']} ({size / 1e6:.1f} MB); open it in ui.perfetto.dev"
    )
