"""The processes of a run's sinks: started beside the workers and started again for ever. Nothing they do is the run's."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence

from streamrl.config.tree import Config
from streamrl.errors import LaunchError
from streamrl.launch.local import LocalLauncher, LocalProcess
from streamrl.runtime.beats import STACKS_S, Silence
from streamrl.runtime.kinds import SINK_KIND
from streamrl.runtime.retries import pause_s
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import describe_exit

logger = logging.getLogger(__name__)

_TICK_S = 0.2
_MOST_PAUSE_S = 60.0
_WELL_S = 60.0
"""One that has run for this long is well: its next failure is told anew."""
_LOADING_S = 120.0
_SILENT_S = 60.0
DRAIN_S = 8.0
"""What sinks get at the end to write what is left."""
_CHARS = 300


class _Child:
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.process: LocalProcess | None = None
        self.started_s = 0.0
        self.resume_s = 0.0
        """When it is started, on the monotonic clock."""
        self.heard = False
        """Whether it has been since it was started."""
        self.starts = 0
        self.failures = 0
        """In a row."""
        self.silence = Silence(_SILENT_S, _LOADING_S, 0.0)
        self.kill_s: float | None = None


class Sinks:
    """The sinks of one session, on this host also where workers are on others.

    Args:
        config: which.
        run: whose.
        note: told what people should know, one line for a row of failures.
        clock: seconds that never fall.
    """

    def __init__(self, config: Config, run: RunDir, note: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._children = [_Child(kind) for kind in dict.fromkeys(config.metrics.sinks)]
        self._backoff_s = config.supervise.backoff_s
        self._note = note
        self._clock = clock
        self._run = run
        self._killable: list[LocalProcess] = []
        self._launcher = LocalLauncher(run, config, command=self._command)

    async def keep_running(self) -> None:
        """Start them, and those that have ended again, until cancelled."""
        while self._children:
            for child in self._children:
                self._look(child)
            await asyncio.sleep(_TICK_S)

    async def drain(self) -> None:
        """Have them write what is left, and end; those that do not are killed."""
        children, self._children = self._children, []
        running = [(child, child.process) for child in children if child.process is not None and child.process.poll() is None]
        self._killable = [process for _, process in running]
        deadline = self._clock() + DRAIN_S
        asked: set[str] = set()
        while any(process.poll() is None for _, process in running) and (now_s := self._clock()) < deadline:
            for child, process in running:
                # Before its first beat it does not listen to the signal, which would end it with nothing written.
                child.heard = child.heard or bool(process.heard())
                if child.kind not in asked and (child.heard or now_s > deadline - DRAIN_S / 2):
                    asked.add(child.kind)
                    process.stop()
            await asyncio.sleep(_TICK_S / 4)
        for child, process in running:
            if (code := process.poll()) is None:
                self._note(f"the sink {child.kind} did not end within {DRAIN_S:g} s and is killed: its last rows may be missing")
                process.kill()
            elif code and not child.failures:
                self._note(f"the sink {child.kind} ended with {describe_exit(code)}{self._said(child)}")

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
        elif child.kill_s is not None:
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
            child.process = self._launcher.start(SINK_KIND.format(kind=child.kind), 0)
        except LaunchError as error:
            self._failed(child, now_s, f"cannot be started: {error.message}")
            return
        child.starts += 1
        logger.info("event=sink_started sink=%s pid=%d", child.kind, child.process.pid)

    def _failed(self, child: _Child, now_s: float, text: str) -> None:
        child.process = None
        child.failures += 1
        seconds = pause_s(child.failures, first_s=max(self._backoff_s, _TICK_S), most_s=_MOST_PAUSE_S)
        child.resume_s = now_s + seconds
        if child.failures == 1:
            self._note(f"the sink {child.kind} {text}; it is started again until it runs, and the run goes on")
        else:
            logger.info("event=sink_failed sink=%s failures=%d pause_s=%g said=%s", child.kind, child.failures, seconds, text)

    def _said(self, child: _Child) -> str:
        """The error that it has named last, or else its last line."""
        lines = [line.strip() for line in self._launcher.tail(f"{SINK_KIND.format(kind=child.kind)}-0").splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:")] or lines
        return f"; {errors[-1].removeprefix('error:').strip()[:_CHARS]}" if errors else ""

    def _command(self, kind: str, index: int) -> Sequence[str]:
        name = kind.removeprefix(SINK_KIND.format(kind=""))
        joined = ("--joined",) if any(child.kind == name and child.starts for child in self._children) else ()
        return (sys.executable, "-m", "streamrl.monitor.sinks", name, "--run", str(self._run.path), *joined)
