"""The load's process as its parent sees it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType

import msgspec

from benchmarks.processes import child
from benchmarks.weights.load import LoadSpec
from streamrl.errors import LaunchError

_STOP_S = 60.0


class LoadProcess:
    """Runs `benchmarks.weights.load` from entering to leaving the context; it has written its files when that is left without an error."""

    def __init__(self, spec: LoadSpec) -> None:
        self._spec = spec
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> LoadProcess:
        path = Path(self._spec.out) / "load.json"
        path.write_bytes(msgspec.json.encode(self._spec))
        command = child("benchmarks.weights.load", path)
        self._process = await asyncio.create_subprocess_exec(*command["args"], env=command["env"], stdin=asyncio.subprocess.PIPE)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        process = self._process
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_S):
                code = await process.wait()
        except TimeoutError:
            process.kill()
            code = await process.wait()
        (Path(self._spec.out) / "load.json").unlink(missing_ok=True)
        if code and kind is None:
            raise LaunchError(f"the load process: expected exit code 0, got {code}", hint="its error stands above")

    def check(self) -> None:
        """Raise LaunchError when the process has ended."""
        code = None if self._process is None else self._process.returncode
        if code is not None:
            raise LaunchError(f"the load process ended with exit code {code} while it was needed", hint="its error stands above")
