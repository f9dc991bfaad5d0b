"""The smallest run, with `up` of its own: as a process (`tiny_up.py`), or within the test; and a server to which runs post."""

import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


class Hook:
    """A server that keeps what it is sent."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.status = 204
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.got.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(hook.status)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                return None

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.base = f"http://127.0.0.1:{self._server.server_port}"
        self.url = f"{self.base}/hook"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.close()
