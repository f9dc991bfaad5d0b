"""The agents of a run that is disturbed: a process of several, which reaches the gateway over a wire that can be cut."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.support.world.agents import Told, read_told
from tests.support.world.commands import command
from tests.support.world.shapes import NAME
from tests.support.world.wire import PROXY, Wire

AGENTS = "4"


class Crew:
    """One process at a time; one that was killed leaves what it had written down, and its sessions to their limits."""

    def __init__(self, place: Path, wire: Wire) -> None:
        self.wire = wire
        self._place = place
        self._process: asyncio.subprocess.Process | None = None
        self._files: list[Path] = []

    @property
    def pid(self) -> int | None:
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def begin(self) -> None:
        if self._process is not None:
            await self._process.wait()
        self._files.append(self._place / f"told-{len(self._files)}.jsonl")
        words = ("--run", f"runs/{NAME}", "--out", str(self._files[-1]), "--agents", AGENTS, "--host", PROXY, "--rewards", "0")
        self._process = await command(self._place, *words, "--seed", str(100 * len(self._files)), module="tests.support.world.agents")

    async def end(self) -> None:
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.wait()

    def told(self) -> Told:
        return read_told(*self._files)
