"""`dead`: the messages that could not be used: list them, look at one, publish it again."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.numbers import seconds
from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from streamrl.history.dead_letters import Fate, Replayed
    from streamrl.runtime.rundir import RunDir
    from streamrl.schemas.dead import DeadRecord

_PREVIEW_BYTES = 256


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    dead = verbs.add_parser("dead", help="list, show or replay messages that could not be used")
    actions = dead.add_subparsers(title="actions", metavar="ACTION", required=True)

    listing = actions.add_parser("list", help="every dead letter with its reason")
    listing.set_defaults(run_verb=run_list)

    show = actions.add_parser("show", help="one dead letter: reason, headers, and how its body begins")
    show.add_argument("--out", metavar="FILE", help="write the original bytes of the body to FILE")
    show.set_defaults(run_verb=run_show)

    replay = actions.add_parser("replay", help="publish dead letters again, and say what becomes of them")
    replay.add_argument("--body", metavar="FILE", help="the repaired body; for one letter")
    replay.add_argument(
        "--wait", dest="wait_s", type=seconds, default=5.0, metavar="SECONDS", help="how long to wait for the trainer's word"
    )
    replay.set_defaults(run_verb=run_replay)

    for action in (listing, show, replay):
        action.add_argument("run", metavar="RUN", help="name or directory of the run")
        action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument("--dir", default="runs", help="directory that holds the runs")
    show.add_argument("sequence", type=int, metavar="SEQ", help="sequence of the message on the sample stream, as `list` shows it")
    replay.add_argument("sequences", type=int, nargs="+", metavar="SEQ", help="sequences of the messages on the sample stream")


def run_list(arguments: argparse.Namespace) -> int:
    """Print all letters."""
    letters = asyncio.run(_list(_run(arguments)))
    if arguments.json:
        print(json.dumps([_facts(letter) for letter in letters], indent=2))
        return 0
    if not letters:
        print(f"run {_run(arguments).name} has no dead letters")
        return 0
    print(f"{'SEQ':>8}  {'TASK':>6}  {'BYTES':>8}  {'STORED':19}  SUBJECT  REASON")
    for letter in letters:
        facts = _facts(letter)
        task = "-" if letter.task is None else letter.task
        stored = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(letter.time_s)) if letter.time_s else "-"
        print(f"{letter.sequence:>8}  {task:>6}  {facts['bytes']:>8}  {stored:19}  {letter.subject}  {letter.reason}")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print one letter."""
    letter = asyncio.run(_show(_run(arguments), arguments.sequence))
    if arguments.out:
        _write(arguments.out, letter.body)
    if arguments.json:
        print(json.dumps({**_facts(letter), "headers": letter.headers, "body_hex": letter.body[:_PREVIEW_BYTES].hex()}, indent=2))
        return 0
    for name, value in _facts(letter).items():
        print(f"{name + ':':10} {value}")
    for name, value in letter.headers.items():
        print(f"{'header:':10} {name}: {value}")
    print("body:")
    for start in range(0, min(len(letter.body), _PREVIEW_BYTES), 16):
        row = letter.body[start : start + 16]
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in row)
        print(f"  {start:06x}  {row.hex(' '):47}  {text}")
    if len(letter.body) > _PREVIEW_BYTES:
        print(f"  ... {len(letter.body) - _PREVIEW_BYTES} more bytes; --out FILE writes them all")
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """Publish letters again; 1 if one of them is quarantined once more."""
    if arguments.body and len(arguments.sequences) > 1:
        raise ConfigError(
            f"--body repairs one letter, got {len(arguments.sequences)} sequences", hint="replay the others in a command of their own"
        )
    body = _read(arguments.body) if arguments.body else None
    results = asyncio.run(_replay(_run(arguments), arguments.sequences, body, arguments.wait_s))
    if arguments.json:
        print(
            json.dumps(
                [
                    {"letter": replayed.letter, "sequence": fate.sequence, "duplicate": replayed.duplicate, "task": replayed.task}
                    | {"state": fate.state, "detail": fate.detail}
                    for replayed, fate in results
                ],
                indent=2,
            )
        )
    else:
        for replayed, fate in results:
            again = " (these bytes had been replayed before)" if replayed.duplicate else ""
            print(f"letter {replayed.letter} published again at {fate.line}{again}")
    return 1 if any(fate.state == "quarantined" for _, fate in results) else 0


def _run(arguments: argparse.Namespace) -> RunDir:
    from streamrl.runtime.rundir import RunDir

    return RunDir.find(arguments.run, base=arguments.dir)


def _facts(letter: DeadRecord) -> dict[str, Any]:
    size = len(letter.body) if letter.num_bytes is None else letter.num_bytes
    return {
        "sequence": letter.sequence,
        "task": letter.task,
        "subject": letter.subject,
        "reason": letter.reason,
        "bytes": size,
        "time_s": letter.time_s,
    }


async def _list(run: RunDir) -> list[DeadRecord]:
    from streamrl.history.dead_letters import DeadLetters
    from streamrl.runtime.run_bus import open_bus
    from streamrl.schemas.subjects import Subjects

    async with open_bus(run) as bus:
        return [letter async for letter in DeadLetters(bus, Subjects(run.load_config().run.name)).letters()]


async def _show(run: RunDir, sequence: int) -> DeadRecord:
    from streamrl.history.dead_letters import DeadLetters
    from streamrl.runtime.run_bus import open_bus
    from streamrl.schemas.subjects import Subjects

    async with open_bus(run) as bus:
        return await DeadLetters(bus, Subjects(run.load_config().run.name)).get(sequence)


async def _replay(run: RunDir, sequences: list[int], body: bytes | None, wait_s: float) -> list[tuple[Replayed, Fate]]:
    from streamrl.history.dead_letters import DeadLetters, Fates
    from streamrl.runtime.lock import holder
    from streamrl.runtime.run_bus import open_bus
    from streamrl.schemas.subjects import Subjects

    config = run.load_config()
    subjects = Subjects(config.run.name)
    up = bool(config.bus.url) or holder(run) is not None
    async with open_bus(run) as bus:
        letters, fates = DeadLetters(bus, subjects), Fates(bus, subjects, config.trainer.name)
        replayed = [await letters.replay(sequence, body=body) for sequence in sequences]
        # A run that is not up has no trainer that could say anything before it goes on.
        wait = wait_s if up else 0.0
        return [(one, await fates.of_message(one.sequence, task=one.task, wait_s=wait)) for one in replayed]


def _read(path: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"the body {path} cannot be read: {error.strerror}", hint="name a file, or - for standard input") from error


def _write(path: str, body: bytes) -> None:
    try:
        Path(path).write_bytes(body)
    except OSError as error:
        raise ConfigError(f"the body cannot be written to {path}: {error.strerror}", hint="choose another file with --out") from error
