"""The smallest run, with `up` of its own: as a process (`tiny_up.py`), or within the test."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from streamrl.config.load import load
from streamrl.launch import up as launch
from streamrl.launch.local import LocalLauncher
from streamrl.monitor.outcome import Outcome
from streamrl.monitor.screen import PlainLines
from streamrl.runtime.rundir import RunDir
from tests.support.programs import Start, surroundings
from tests.support.tiny import tiny_command, tiny_up, write_tiny


class Here:
    """`up` in this process, whose workers are tiny ones."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._out = io.StringIO()

    @property
    def said(self) -> str:
        return self._out.getvalue()

    async def up(self, mode: str, *overrides: str) -> Outcome:
        config = load(self._place / "demo.toml", overrides)
        run = RunDir(Path(config.run.dir) / config.run.name)
        launcher = LocalLauncher(run, config, command=tiny_command(run, mode)) if mode else None
        return await launch.up(config, PlainLines(self._out), launcher=launcher)

    async def notes(self, mode: str, *overrides: str) -> str:
        before = len(self.said)
        assert (await self.up(mode, *overrides)).state == "finished"
        return "\n".join(line.partition("] ")[2] for line in self.said[before:].splitlines())

    @staticmethod
    def printed(outcome: Outcome) -> str:
        out = io.StringIO()
        outcome.print(Console(file=out, width=200, soft_wrap=True))
        return out.getvalue()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a run file and four problems."""
    write_tiny(tmp_path)
    return tmp_path


@pytest.fixture
def run(place: Path) -> RunDir:
    return RunDir(place / "runs" / "demo")


@pytest.fixture
def up(place: Path, start: Start) -> Start:
    return tiny_up(start)


@pytest.fixture
def here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.chdir(place)
    monkeypatch.setenv("PYTHONPATH", surroundings()["PYTHONPATH"])  # workers import tests.support.tiny
    return Here(place)
