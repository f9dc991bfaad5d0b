"""The runs of a directory, and what the files of each say: the list that `streamrl runs` and `streamrl status` print."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from streamrl.errors import ConfigError
from streamrl.monitor.drawing import visible
from streamrl.monitor.run_state import INTERRUPTED, PREPARING, REMOVING, RUNNING, RunState, read_state
from streamrl.monitor.screen import decimal, one_line
from streamrl.monitor.summary import Summary, read_summary
from streamrl.runtime.lock import holder
from streamrl.runtime.rundir import BRANCH_FILE, RunDir, known_runs
from streamrl.system import write_private

MOST_NOTE_CHARS = 1000
_NOTE_CHARS = 60
"""The part of a note that the table shows."""
_PIPE_WIDTH = 1000
_BLOCK_BYTES = 512
"""A block of `st_blocks`, whatever the size of the file system's own."""


class RunLine(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the list. None: not known."""

    run: str
    path: str
    state: str
    """`preparing`, `running`, `finished`, `stopped` (drained), `failed`, `interrupted` (killed), `removing` (`streamrl runs rm` has begun
    and not ended), or that it cannot be read, and why."""
    supervisor: int | None
    """Process id of its supervisor; 0: not known; None: it is not up."""
    began_s: float | None = None
    """Unix seconds of its last start; of a branch, of when it was made."""
    ended_s: float | None = None
    """Unix seconds of its end, or of its last sign of life; None while it is up."""
    step: int | None = None
    """Batches of reinforcement learning so far."""
    steps: int = 0
    """Where it ends; 0: not known."""
    reward_first: float | None = None
    """Mean reward of the first batches, at most 20."""
    reward_last: float | None = None
    """The same of the newest ones."""
    loss_first: float | None = None
    """In runs of kind `sft`: mean loss of the first batches."""
    loss_last: float | None = None
    heldout_first: float | None = None
    """Mean reward of the first set of problems when reinforcement learning began."""
    heldout_last: float | None = None
    """The newest one."""
    model: str = ""
    """Name of the initial policy; of one that was built, its layers and width."""
    bytes: int | None = None
    """Size on disk; only in the list."""
    note: str = ""
    """As `streamrl runs note` has stored it."""
    parent: str = ""
    """The run that a branch was trained from."""
    error: str = ""
    """Why it failed."""
    summary: Summary | None
    """The content of `summary.json`: the last stop."""


class _Model(msgspec.Struct, frozen=True):
    path: str = ""
    layers: int = 0
    hidden: int = 0


class _Config(msgspec.Struct, frozen=True):
    """The part of `config.json` that the list shows. Other versions may have other keys beside it."""

    model: _Model = _Model()


class _Branch(msgspec.Struct, frozen=True):
    """The part of `branch.json` that the list shows."""

    parent: str = ""


def list_runs(base: str | Path) -> list[RunLine]:
    """All runs under `base`, the most recently started first. Raises ConfigError where `base` cannot be read."""
    return [_listed(run) for run in known_runs(base, begun=True)]


def _listed(run: RunDir) -> RunLine:
    try:
        return replace(describe(run), bytes=bytes_on_disk(run.path))
    except ConfigError as error:
        cause = error.__cause__
        why = cause.strerror if isinstance(cause, OSError) else error.message
        return RunLine(run=_shown(run.name), path=_shown(str(run.path)), state=f"cannot be read: {why}", supervisor=None, summary=None)


def _shown(name: str) -> str:
    """A name as it can be printed; a file system's may hold bytes that are no text."""
    return os.fsencode(name).decode(errors="replace")


def describe(run: RunDir) -> RunLine:
    """Describe a run by its files alone, without its size. Raises ConfigError where they cannot be looked at."""
    prepared, found = run.exists, holder(run)
    last, summary = read_state(run), read_summary(run.summary_path)
    parent = parent_of(run)
    state = _state(last, summary, prepared=prepared, up=found is not None, is_branch=bool(parent))
    began_s = _time_of(run.config_path) or _time_of(run.lock_path)
    signs = filter(None, (began_s, _time_of(run.state_path), _time_of(run.summary_path)))
    line = RunLine(
        run=_shown(run.name),
        path=_shown(str(run.path)),
        state=state,
        supervisor=None if found is None else found.pid,
        began_s=began_s,
        ended_s=max(signs, default=None) if found is None else None,
        step=last.step if last is not None else summary.steps if summary is not None else None,
        steps=last.steps if last is not None else 0,
        model=_model_name(_read(run.config_path, _Config()).model) if prepared else "",
        note=read_note(run),
        parent=parent,
        error=last.error if last is not None and state == "failed" else "",
        summary=summary,
    )
    return _with_rewards(line, last, summary)


def _state(last: RunState | None, summary: Summary | None, *, prepared: bool, up: bool, is_branch: bool) -> str:
    if last is not None and last.state == REMOVING:
        return REMOVING
    if up:
        return RUNNING if prepared else PREPARING
    if is_branch:  # nobody supervises one: its summary is written last
        return INTERRUPTED if summary is None else "finished"
    if not prepared:
        return INTERRUPTED
    if last is None:
        return "stopped"
    return INTERRUPTED if last.state == RUNNING else last.state


def _with_rewards(line: RunLine, last: RunState | None, summary: Summary | None) -> RunLine:
    """The summary's where the run has ended; of one that is up or was killed, what its supervisor wrote last."""
    glance = last.glance if last is not None else None
    if summary is not None and (glance is None or line.state not in (RUNNING, INTERRUPTED)):
        return replace(
            line,
            reward_first=summary.reward_first,
            reward_last=summary.reward_last,
            loss_first=summary.loss_first,
            loss_last=summary.loss_last,
            heldout_first=summary.heldout_first,
            heldout_last=summary.heldout_last,
        )
    if glance is None:
        return line
    return replace(
        line,
        reward_first=glance.reward_first,
        reward_last=glance.reward,
        loss_first=glance.loss_first,
        loss_last=glance.loss,
        heldout_first=glance.heldout_first,
        heldout_last=glance.heldout,
    )


def parent_of(run: RunDir) -> str:
    """The run that a branch was trained from; empty: it is none."""
    return _read(run.path / BRANCH_FILE, _Branch()).parent


def _read(path: Path, absent: Any) -> Any:
    """A file of JSON as the type of `absent`, which it is where the file is missing or of another form."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=type(absent))
    except (OSError, msgspec.MsgspecError):
        return absent


def _time_of(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _model_name(model: _Model) -> str:
    if not model.path:
        return f"built {model.layers} x {model.hidden}" if model.layers else ""
    path = Path(model.path)
    hub = [part for part in path.parts if part.startswith("models--")]  # a folder of huggingface_hub's cache
    return _shown(hub[-1].removeprefix("models--").replace("--", "/") if hub else path.name)


def bytes_on_disk(folder: str | Path) -> int:
    """Bytes of disk that the files in a folder take, those with several names in it counted once; links are not followed.

    What cannot be read, or goes meanwhile, counts as nothing.
    """
    total, seen, folders = 0, set[tuple[int, int]](), [os.fspath(folder)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif status.st_nlink > 1:
                        if (status.st_dev, status.st_ino) in seen:
                            continue
                        seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * _BLOCK_BYTES
        except OSError:
            continue
    return total


def read_note(run: RunDir) -> str:
    """The note on a run; empty: there is none that can be read."""
    try:
        with run.note_path.open("rb") as file:
            return file.read(4 * MOST_NOTE_CHARS).decode(errors="replace").strip()[:MOST_NOTE_CHARS]
    except OSError:
        return ""


def write_note(run: RunDir, text: str) -> None:
    """Store a note on a run in place of the one before; an empty text removes it.

    Raises:
        ConfigError: it is too long or no text, or the run's directory takes no file.
    """
    text = text.strip()
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError("expected a note in UTF-8, got bytes that are no text", hint="write it in letters of UTF-8") from error
    if len(text) > MOST_NOTE_CHARS:
        raise ConfigError(
            f"expected a note of at most {MOST_NOTE_CHARS} characters, got {len(text)}", hint="shorten it, and keep the long one in a file"
        )
    try:
        if text:
            write_private(run.note_path, data)
        else:
            run.note_path.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the note cannot be written to {run.note_path}: {error.strerror}",
            hint="whose is the run, and is the disk full?",
            path=str(run.note_path),
        ) from error


def print_runs(lines: Sequence[RunLine], *, as_json: bool) -> None:
    """The list, to stdout."""
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(lines), indent=2).decode())
        return
    if not lines:
        print("there are no runs yet; `streamrl up my.toml` starts one")
        return
    from rich.console import Console  # who only looks at a run need not load it
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("run", "state", "started", "steps", "reward", "held-out", "model", "size"):
        table.add_column(title, overflow="fold")
    noted = any(line.note for line in lines)
    if noted:
        table.add_column("note", overflow="fold")
    for line in lines:
        cells = [visible(line.run), visible(line.state), _when(line.began_s), steps_text(line), _reward(line)]
        cells += [_from_to(line.heldout_first, line.heldout_last), visible(line.model), size_text(line.bytes)]
        table.add_row(*map(Text, [*cells, *([one_line(line.note, most=_NOTE_CHARS)] if noted else [])]))
    wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    Console(width=None if wide else _PIPE_WIDTH).print(table)
    total = size_text(sum(line.bytes or 0 for line in lines))
    print(f"{len(lines)} {'run' if len(lines) == 1 else 'runs'} in {visible(os.path.dirname(lines[0].path))}, {total}")


def steps_text(line: RunLine) -> str:
    """Batches done, and of how many where that is known."""
    if line.step is None:
        return "-"
    return f"{line.step}/{line.steps}" if line.steps else str(line.step)


def size_text(count: int | None) -> str:
    """Bytes in words."""
    if count is None:
        return "-"
    for bound, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= bound:
            return f"{count / bound:.1f} {unit}"
    return f"{count} B"


def _reward(line: RunLine) -> str:
    if line.loss_last is not None:
        return f"loss {_from_to(line.loss_first, line.loss_last)}"
    said = _from_to(line.reward_first, line.reward_last)
    return f"{said} (recorded)" if line.parent and line.reward_last is not None else said


def _from_to(first: float | None, last: float | None) -> str:
    if last is None:
        return "-"
    return decimal(last) if first is None else f"{decimal(first)} -> {decimal(last)}"


def _when(time_s: float | None) -> str:
    return "-" if time_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
