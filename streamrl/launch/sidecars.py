"""Processes beside the workers of a run: started on this host, and started again for ever. Nothing they do is the run's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.launch.local import LocalLauncher, LocalProcess
from streamrl.runtime.beats import STACKS_S, Silence
from streamrl.runtime.retries import pause_s
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import describe_exit

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_MOST_PAUSE_S = 60.0
_WELL_S = 60.0
"""One that has run for this long is well: its next failure is told anew."""
_BLIND_S = 5.0
"""After a look that has failed."""
_LOADING_S = 120.0
_SILENT_S = 60.0
_KILLED_LOOKS = 40
"""Often enough for the kernel to end what was killed."""
_CHARS = 300


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """What is kept running.

    Args:
        kind: of process, which names its log and what of the environment it gets.
        called: in sentences.
        command: its command line; told whether it was started before in this session.
        loses: what may be missing when it is killed at the end; empty: nothing, and its end is not spoken of.
        runs: called with its process id a few times a second while it runs.
    """

    kind: str
    called: str
    command: Callable[[bool], Sequence[str]]
    loses: str = ""
    runs: Callable[[int], None] = lambda pid: None


class _Child:
    def __init__(self, sidecar: Sidecar) -> None:
        self.sidecar = sidecar
        self.process: LocalProcess | None = None
        self.started_s = 0.0
        self.resume_s = 0.0
        """When it is started, on the monotonic clock."""
        self.look_s = 0.0
        """It is not looked at before, on that clock."""
        self.heard = False
        """Whether it has been since it was started."""
        self.starts = 0
        self.failures = 0
        """In a row."""
        self.silence = Silence(_SILENT_S, _LOADING_S, 0.0)
        self.kill_s: float | None = None


class Sidecars:
    """The sidecars of one session, on this host also where workers are on others.

    Args:
        sidecars: which.
        run: whose.
        config: of the run.
        note: told what people should know, one line for a row of failures.
        drain_s: what they get at the end to write what is left.
        clock: seconds that never fall.
    """

    def __init__(
        self,
        sidecars: Sequence[Sidecar],
        run: RunDir,
        config: Config,
        *,
        note: Callable[[str], None],
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = [_Child(sidecar) for sidecar in sidecars]
        self._backoff_s = config.supervise.backoff_s
        self._note = note
        self._drain_s = drain_s
        self._clock = clock
        self._killable: list[LocalProcess] = []
        self._launcher = LocalLauncher(run, config, command=self._command)

    @contextlib.asynccontextmanager
    async def kept(self) -> AsyncGenerator[None]:
        """Keep them running while open; then they are drained."""
        keeping = asyncio.create_task(self.keep_running())
        try:
            yield
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            try:
                await self.drain()
            finally:
                self.kill()

    async def keep_running(self) -> None:
        """Start them, and those that have ended again, until cancelled."""
        while self._children:
            for child in self._children:
                if self._clock() < child.look_s:
                    continue
                try:
                    self._look(child)
                except Exception:  # written policy: what one of them meets never ends the care for others, nor is it missed in silence
                    logger.exception("event=sidecar_look_failed kind=%s", child.sidecar.kind)
                    child.look_s = self._clock() + _BLIND_S
            await asyncio.sleep(_TICK_S)

    async def drain(self) -> None:
        """Have them write what is left, and end; those that do not are killed."""
        children, self._children = self._children, []
        running = [(child, child.process) for child in children if child.process is not None and child.process.poll() is None]
        self._killable = [process for _, process in running]
        deadline = self._clock() + self._drain_s
        asked: set[str] = set()
        while any(process.poll() is None for _, process in running) and (now_s := self._clock()) < deadline:
            for child, process in running:
                # Before its first beat it does not listen to the signal, which would end it with nothing written.
                child.heard = child.heard or bool(process.heard())
                if child.sidecar.kind not in asked and (child.heard or now_s > deadline - self._drain_s / 2):
                    asked.add(child.sidecar.kind)
                    process.stop()
            await asyncio.sleep(_TICK_S / 4)
        for child, process in running:
            if (code := process.poll()) is None:
                self._last(child, f"did not end within {self._drain_s:g} s and is killed: {child.sidecar.loses} may be missing")
                process.kill()
            elif code and not child.failures:
                self._last(child, f"ended with {describe_exit(code)}{self._said(child)}")
        for _ in range(_KILLED_LOOKS):
            if all(process.poll() is not None for _, process in running):
                return
            await asyncio.sleep(_TICK_S / 4)

    def kill(self) -> None:
        """End what is left at once."""
        for process in [*(child.process for child in self._children), *self._killable]:
            if process is not None:
                process.kill()

    def _look(self, child: _Child) -> None:
        now_s = self._clock()
        if child.process is None:
            if now_s >= child.resume_s:
                self._start(child, now_s)
            return
        code = child.process.poll()
        if code is not None:
            why = f" ({child.silence.why})" if child.silence.why else ""
            self._failed(child, now_s, f"ended with {describe_exit(code)}{why}{self._said(child)}")
            return
        child.sidecar.runs(child.process.pid)
        if child.kill_s is not None:
            if now_s >= child.kill_s:
                child.process.kill()
        elif child.silence.look(self._heard(child, child.process), now_s):
            child.kill_s = now_s + STACKS_S
            child.process.dump()
        elif now_s >= child.started_s + _WELL_S:
            child.failures = 0

    def _heard(self, child: _Child, process: LocalProcess) -> str:
        beat = process.heard()
        child.heard = child.heard or bool(beat)
        return beat

    def _start(self, child: _Child, now_s: float) -> None:
        child.started_s, child.heard = now_s, False
        child.silence, child.kill_s = Silence(_SILENT_S, _LOADING_S, now_s), None
        try:
            child.process = self._launcher.start(child.sidecar.kind, 0)
        except LaunchError as error:
            self._failed(child, now_s, f"cannot be started: {error.message}")
            return
        child.starts += 1
        logger.info("event=sidecar_started kind=%s pid=%d", child.sidecar.kind, child.process.pid)

    def _failed(self, child: _Child, now_s: float, text: str) -> None:
        child.process = None
        child.failures += 1
        seconds = pause_s(child.failures, first_s=max(self._backoff_s, _TICK_S), most_s=_MOST_PAUSE_S)
        child.resume_s = now_s + seconds
        if child.failures == 1:
            self._note(f"{child.sidecar.called} {text}; it is started again until it runs, and the run goes on")
        else:
            logger.info("event=sidecar_failed kind=%s failures=%d pause_s=%g said=%s", child.sidecar.kind, child.failures, seconds, text)

    def _last(self, child: _Child, text: str) -> None:
        if child.sidecar.loses:
            self._note(f"{child.sidecar.called} {text}")

    def _said(self, child: _Child) -> str:
        """The error that it has named last, or else its last line."""
        lines = [line.strip() for line in self._launcher.tail(f"{child.sidecar.kind}-0").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:")] or lines
        return f"; {errors[-1].removeprefix('error:').strip()[:_CHARS]}" if errors else ""

    def _command(self, kind: str, index: int) -> Sequence[str]:
        child = next(child for child in self._children if child.sidecar.kind == kind)
        return child.sidecar.command(bool(child.starts))
