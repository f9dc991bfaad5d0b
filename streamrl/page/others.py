"""Other runs of the same directory of runs, by their metrics files, and branches, by their ledgers; none of these is changed."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from streamrl.config.tree import Config
from streamrl.errors import ConfigError, NotFound
from streamrl.history.branch_file import LEDGER_FILE
from streamrl.history.differences import config_differences
from streamrl.monitor.metrics_file import files
from streamrl.monitor.series import BATCH
from streamrl.page.address import page_folder
from streamrl.page.index import TOKENS, TRAINED_TOKENS, Index, Progress
from streamrl.page.tables import Numbers, as_json, rolling, shrink_to_means
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from streamrl.schemas.subjects import RUN_ID
from streamrl.telemetry.names import PARENT_DISTANCE

MOST_RUNS = 1000
"""That are listed, the newest ones."""
MOST_COMPARED = 8
"""Runs beside this one in one comparison: as many colours as there are."""
MOST_KEPT = 16
"""Runs whose rows are kept beside this run's; of more, the one that was looked at the longest ago is read anew when it is wanted."""
ROLLING = 20
"""Batches that a throughput is taken over, and that the last values are means of."""
_POINTS = 600
_READ_S = 0.5
_MOST_DIFFERENCES = 200
_CHARS = 500
AXES = ("version", "step", TOKENS, "elapsed_s")
_CURVES = {
    "reward": "rollout/raw_reward",
    "loss": "train/loss",
    "staleness": "staleness/mean",
    "staleness_p95": "staleness/p95",
    "parent_distance": PARENT_DISTANCE,
    "sampler_distance": "train/train_rollout_logprob_abs_diff",
}
_AMOUNT, _SECONDS = "tokens/trained_total", "perf/step_time"
_METRICS = frozenset({_AMOUNT, _SECONDS, TRAINED_TOKENS, *_CURVES.values()})


class Curves(msgspec.Struct, frozen=True, kw_only=True):
    """One of the runs."""

    name: str
    parent: str
    """The run with whose samples a branch's rewards were recorded; empty: it is no branch."""
    batches: int
    seconds: float
    """From its first batch to its newest, pauses included."""
    x: list[float | None]
    """Versions, steps, trained tokens, or seconds since the first batch."""
    values: dict[str, list[float | None]]
    """`throughput` and the keys of `_CURVES`: means of neighbouring batches where there are many, or of those that were asked for."""
    last: dict[str, float | None]
    """Of the same, the means of the newest batches."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """A run and others."""

    runs: list[Curves]
    """The run itself first."""
    reading: Progress | None
    """Places up to which the others have been read; None: to their ends."""
    differences: list[list[str]]
    """Keys of the configuration in which one differs from the run itself, and what each has."""
    trouble: str
    """Why a configuration is not compared."""


class Others:
    """The runs beside one.

    Args:
        run: whose page it is.
        config: its own.
        index: its own.
    """

    def __init__(self, run: RunDir, config: Config, index: Index) -> None:
        self._run, self._config, self._index = run, config, index
        self._folder = page_folder(run) / "others"
        self._opened: dict[str, tuple[int, Index]] = {}
        """By name, the number of the run's directory, and its rows; the one that was looked at last at the end."""
        self._fresh = True
        self._one_at_a_time = asyncio.Lock()

    def names(self) -> list[str]:
        """Runs of the same directory that can be compared, the most recently started first."""
        found: list[tuple[float, str]] = []
        try:
            with os.scandir(self._run.path.parent) as entries:
                for entry in entries:
                    if entry.name != self._run.name and (began_s := _began_s(entry)) is not None:
                        found.append((began_s, entry.name))
        except OSError:
            return []
        return [name for _, name in sorted(found, reverse=True)[:MOST_RUNS]]

    async def compare(self, names: Sequence[str], x: str, *, smooth: int = 1) -> Comparison:
        """This run and those of these names, over `x` of `AXES`; each value is the mean of `smooth` batches that end with it.

        Reads a stretch of the others' rows, so it is to be called again.

        Raises:
            NotFound: there is no such run.
            OSError: there is no room for its rows.
        """
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._compare, names, x, smooth)

    def _compare(self, names: Sequence[str], x: str, smooth: int) -> Comparison:
        if not self._folder.parent.is_dir():
            raise NotFound(f"expected run {self._run.name!r} in {self._run.path.parent}, got nothing", hint="was it deleted?")
        known = self.names()
        others = [RunDir(self._run.path.parent / name) for name in names]
        for other in others:
            if other.name not in known or any(path.is_symlink() for path in files(other.metrics)):
                self._forget(other.name)
                raise NotFound(f"expected a run beside {self._run.name!r}, got {other.name!r}", hint="was it deleted?")
        indices = [self._index_of(other) for other in others]
        until_s = time.monotonic() + _READ_S
        reading: list[Progress] = []
        for index in indices:
            while (more := index.read_rows()) and time.monotonic() < until_s:
                pass
            if more:
                reading.append(index.progress())
        differences, trouble = self._differences(others)
        named = zip((self._run.name, *names), (self._index, *indices), strict=True)
        return Comparison(
            runs=[_curves(name, index, x, smooth) for name, index in named],
            reading=Progress(sum(one.done for one in reading), sum(one.total for one in reading)) if reading else None,
            differences=differences,
            trouble=trouble,
        )

    def _index_of(self, other: RunDir) -> Index:
        if self._fresh:  # what an earlier page has left: the runs may have been made anew since
            shutil.rmtree(self._folder, ignore_errors=True)
            self._fresh = False
        inode = other.path.stat().st_ino
        known = self._opened.get(other.name)
        if known is not None and known[0] != inode:
            self._forget(other.name)
            known = None
        index = Index(other, self._folder / other.name, only=_METRICS) if known is None else known[1]
        self._opened.pop(other.name, None)
        self._opened[other.name] = (inode, index)
        while len(self._opened) > MOST_KEPT:
            self._forget(next(iter(self._opened)))
        return index

    def _forget(self, name: str) -> None:
        if self._opened.pop(name, None) is not None:
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _differences(self, others: Sequence[RunDir]) -> tuple[list[list[str]], str]:
        rows: dict[str, list[str]] = {}
        trouble = ""
        for place, other in enumerate(others, start=1):
            try:
                found = config_differences(self._config, other.load_config())
            except ConfigError as error:
                trouble = error.message
                continue
            for one in found:
                rows.setdefault(one.key, [_text(one.a)] * (1 + len(others)))[place] = _text(one.b)
        return [[key, *values] for key, values in sorted(rows.items())[:_MOST_DIFFERENCES]], trouble


def _began_s(entry: os.DirEntry[str]) -> float | None:
    """When a run was started last; None for what is no run, or leads elsewhere."""
    try:
        if not RUN_ID.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            return None
        config = os.lstat(os.path.join(entry.path, "config.json"))
        if not stat.S_ISREG(config.st_mode):
            return None
        try:
            branch = os.lstat(os.path.join(entry.path, BRANCH_FILE)).st_mode
        except FileNotFoundError:
            return config.st_mtime if stat.S_ISDIR(os.lstat(os.path.join(entry.path, "metrics")).st_mode) else None
        # A branch has rows in its ledger alone.
        ledger = os.lstat(os.path.join(entry.path, LEDGER_FILE)).st_mode
        return config.st_mtime if stat.S_ISREG(branch) and stat.S_ISREG(ledger) else None
    except OSError:
        return None


def _curves(name: str, index: Index, x: str, smooth: int) -> Curves:
    columns = index.columns(BATCH, ["version", "step", "time_s", *_METRICS])
    times = columns["time_s"]
    # A clock that was set back takes no time away.
    elapsed = np.maximum.accumulate(times - times[0]) if len(times) else times
    values = {curve: columns[metric] for curve, metric in _CURVES.items()}
    values["throughput"] = rolling(columns[_AMOUNT], columns[_SECONDS], ROLLING)
    axes = {"elapsed_s": elapsed, TOKENS: np.nan_to_num(columns[TRAINED_TOKENS]).cumsum()}
    drawn = [rolling(column, np.ones(len(column)), smooth) if smooth > 1 else column for column in values.values()]
    places, thin = shrink_to_means(axes[x] if x in axes else columns[x], drawn, _POINTS)
    return Curves(
        name=name,
        parent=index.branch.parent if index.branch is not None else "",
        batches=len(times),
        seconds=float(elapsed[-1]) if len(times) else 0.0,
        x=as_json(places.tolist()),
        values={curve: as_json(column.tolist()) for curve, column in zip(values, thin, strict=True)},
        last={curve: _last(column, 1 if curve == "throughput" else ROLLING) for curve, column in values.items()},
    )


def newest_rate(index: Index) -> float | None:
    """Tokens trained a second over the newest batches of a run; None where there is none."""
    columns = index.columns(BATCH, [_AMOUNT, _SECONDS], last=ROLLING)
    return _last(rolling(columns[_AMOUNT], columns[_SECONDS], ROLLING), 1)


def _last(column: Numbers, most: int) -> float | None:
    known = column[~np.isnan(column)][-most:]
    return float(known.mean()) if len(known) else None


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode(errors="replace")[:_CHARS]
