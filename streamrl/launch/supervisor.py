"""The supervisor: keeps workers running, restarts those that fail, stops them in order. Decides; a Launcher does.

Workers of a kind that is a group (the trainer's ranks) share their fate: when one has failed, the others are ended and all start again.
Any other worker is a process group of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence

from streamrl.config.tree import SuperviseConfig
from streamrl.errors import LaunchError
from streamrl.launch.protocol import Launcher, Process
from streamrl.monitor.numbers import WorkerLine
from streamrl.runtime.beats import STACKS_S, Silence
from streamrl.runtime.kinds import LOADING_S, PROCESS_GROUPS
from streamrl.runtime.retries import FailureWindow, pause_s
from streamrl.runtime.service import SHUTDOWN_ORDER, Exit, describe_exit

logger = logging.getLogger(__name__)

MAX_BACKOFF_S = 30.0
_POLL_S = 0.05
_LINE_CHARS = 300
_LATELY_S = MAX_BACKOFF_S
"""One that has run for so long since it was started again is well: why it had ended explains nothing any more."""
_FINAL: Mapping[int | None, str] = {Exit.CONFIG: "cannot run with this configuration", Exit.DIVERGED: "stopped: the weights diverged"}
"""Exit codes after which a restart would end in the same way."""
_EARLY: Mapping[int | None, str] = {
    Exit.DONE: " before its work was over, as code does that calls os._exit",
    Exit.DRAINED: ", told to drain by a signal that was not sent here",
}
"""Words for ends that are no failures by themselves."""
KILLED_S = 10.0
"""A process that was killed has ended after this long, unless the kernel does not let it go."""
_GRACE_S = 2.0
"""Seconds that what is left of a group gets to end by itself, and to say why, before it is killed; and that the log gets to say that a
worker's work was over, before one that ended with exit code 0 is started again."""


class Child:
    """One worker over all its restarts. States: running -> (ended -> waiting -> running)* -> done | drained | fenced.

    It is `ended` while others of its group have not.
    """

    def __init__(self, kind: str, index: int, process: Process, failures: FailureWindow, silence: Silence) -> None:
        self.kind = kind
        self.index = index
        self.name = f"{kind}-{index}"
        self.process = process
        self.state = "running"
        self.resume_s = 0.0
        """When a waiting child is started again, on the monotonic clock."""
        self.code: int | None = None
        """How it ended last."""
        self.ended_s = 0.0
        self.failures = failures
        self.restarts = 0
        self.said = ""
        """The way in which it ended last, and why in its own words; empty: it has not ended."""
        self.silence = silence
        self.kill_s: float | None = None
        """When it is killed for its silence; None: it is heard."""

    @property
    def why(self) -> str:
        """Why it was ended by who watches it: this supervisor, or one beside it on its node; empty: it was not."""
        return self.silence.why or self.process.why

    @property
    def over(self) -> bool:
        """Whether it runs no more and will not be started again."""
        return self.state in ("done", "drained", "fenced")


class Supervisor:
    """Children of one run.

    Args:
        launcher: starts them.
        config: restarts and patience.
        note: told what people should know, one line at a time.
        clock: seconds that never fall; for tests.
    """

    def __init__(
        self,
        launcher: Launcher,
        config: SuperviseConfig,
        *,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.children: dict[str, Child] = {}
        self._launcher = launcher
        self._config = config
        self._note = note
        self._clock = clock

    def start(self, kind: str, index: int) -> None:
        """Start one worker and keep it running from now on; raises LaunchError."""
        process = self._launcher.start(kind, index)
        child = Child(kind, index, process, FailureWindow(self._config.window_s), self._silence(kind))
        self.children[child.name] = child
        logger.info("event=worker_started worker=%s pid=%d", child.name, child.process.pid)

    def tick(self) -> None:
        """Look at every child and act: called several times a second.

        Raises:
            LaunchError: a worker failed too often, or in a way that a restart cannot mend; the others are still running.
        """
        for child in self.children.values():
            if child.state == "running":
                code = child.process.poll()
                if code is not None:
                    logger.info("event=worker_ended worker=%s %s", child.name, describe_exit(code))
                    child.state, child.code, child.ended_s = "ended", code, self._clock()
                else:
                    self._listen(child)
            elif child.state == "draining":
                self._settle(child)
            elif child.state == "waiting" and self._clock() >= child.resume_s:
                child.process = self._launcher.start(child.kind, child.index)
                child.state = "running"
                child.restarts += 1
                child.silence, child.kill_s = self._silence(child.kind), None
                logger.info("event=worker_restarted worker=%s pid=%d restarts=%d", child.name, child.process.pid, child.restarts)
        for group in self._process_groups():
            if all(child.state == "ended" for child in group):
                last_s = max(child.ended_s for child in group)
                if any(child.code != Exit.DONE for child in group) or self._clock() >= last_s + _GRACE_S:
                    self._ended(group)
            elif any(child.state == "ended" and child.code != Exit.DONE and self._clock() >= child.ended_s + _GRACE_S for child in group):
                for child in group:
                    child.process.kill()

    def drained(self, kind: str) -> str:
        """The worker of `kind` that has drained without having been asked to here: somebody has sent it a signal; empty: none has."""
        return next((child.name for child in self.children.values() if child.kind == kind and child.state == "drained"), "")

    def retire(self, name: str) -> bool:
        """Have a child drain, and not start it again; False: there is no such child, or it does so already."""
        child = self.children.get(name)
        if child is None or child.state not in ("running", "waiting"):
            return False
        if child.state == "running":
            child.process.stop()
        child.state = "draining" if child.state == "running" else "done"
        return True

    def lines(self) -> dict[str, WorkerLine]:
        """State of every child, by name."""
        return {
            child.name: WorkerLine(
                worker=child.name,
                state=child.state,
                pid=child.process.pid,
                restarts=child.restarts,
                silent_s=child.silence.seconds,
                said=child.said if child.state != "running" or self._clock() < child.resume_s + _LATELY_S else "",
            )
            for child in self.children.values()
        }

    async def drain(self, *, order: Sequence[Sequence[str]] = SHUTDOWN_ORDER, finish: Sequence[str] = ()) -> bool:
        """Stop all children, kind after kind; returns whether all of them ended by themselves.

        Args:
            order: kinds that stop together, in the order in which they stop; kinds that are not named stop last.
            finish: kinds that end by themselves: they get `drain_s` before they are asked to stop.
        """
        named = {kind for kinds in order for kind in kinds}
        rest = tuple({child.kind for child in self.children.values()} - named)
        clean = True
        for kinds in (*order, rest):
            stage = [child for child in self.children.values() if child.kind in kinds]
            finishing = [child for child in stage if child.kind in finish]
            await self._wait_for(finishing, self._config.drain_s)
            for child in finishing:
                if child.over and child.code not in (Exit.DONE, Exit.DRAINED, Exit.FENCED):
                    self._note(
                        f"{child.name} ended with {self._ending(child)} and left its last work undone{_log_ends(self._last_line(child))}"
                    )
            for child in stage:
                self._settle(child)
                if not child.over:
                    child.state = "draining"
                    child.process.stop()
            await self._wait_for(stage, self._config.drain_s)
            for child in stage:
                if not child.over:
                    clean = False
                    self._note(f"{child.name} did not stop within {self._config.drain_s:g} s and is killed")
                    logger.warning("event=worker_killed worker=%s pid=%d", child.name, child.process.pid)
                    child.process.kill()
            await self._wait_for_killed(stage)
        return clean

    async def kill_all(self) -> None:
        """End every child at once; returns when all have ended, or are left behind."""
        for child in self.children.values():
            if not child.over:
                child.process.kill()
        await self._wait_for_killed(list(self.children.values()))

    async def _wait_for_killed(self, children: Sequence[Child]) -> None:
        """Those that do not end are said and left behind: nothing can be done from here about a process that the kernel holds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KILLED_S):
                await self._wait_for(children, math.inf)
        for child in children:
            if not child.over:
                child.state = "done"
                self._note(
                    f"{child.name} (process {child.process.pid}) has not ended {KILLED_S:g} s after it was killed, and is left behind: "
                    "it hangs in the kernel, on a device or a disk that does not answer"
                )

    async def _wait_for(self, children: Sequence[Child], seconds: float) -> None:
        deadline = self._clock() + seconds
        while self._clock() < deadline:
            for child in children:
                self._settle(child)
            if all(child.over for child in children):
                return
            await asyncio.sleep(_POLL_S)

    def _settle(self, child: Child) -> None:
        """While draining: what has ended, or waits for a restart, is over whatever its exit code."""
        if child.state in ("waiting", "ended"):
            child.state = "done"
        elif not child.over:
            code = child.process.poll()
            if code is not None:
                logger.info("event=worker_ended worker=%s %s", child.name, describe_exit(code))
                child.state, child.code = "done", code

    def _silence(self, kind: str) -> Silence:
        return Silence(self._config.silent_s, LOADING_S.get(kind, math.inf), self._clock())

    def _listen(self, child: Child) -> None:
        """A worker that is not heard for too long writes its stacks, and a moment later it is killed."""
        now_s = self._clock()
        if child.kill_s is not None:
            if now_s >= child.kill_s:
                child.process.kill()
            return
        why = child.silence.look(child.process.heard(), now_s)
        if why:
            child.kill_s = now_s + STACKS_S
            child.process.dump()
            self._note(f"{child.name} has been {why}: its stacks go to logs/{child.name}.log, and it is killed")

    def _process_groups(self) -> list[list[Child]]:
        """Children that share their fate."""
        process_groups: dict[str, list[Child]] = {}
        for child in self.children.values():
            process_groups.setdefault(child.kind if child.kind in PROCESS_GROUPS else child.name, []).append(child)
        return list(process_groups.values())

    def _ended(self, group: Sequence[Child]) -> None:
        """Decide what becomes of children that have all ended: the first that failed says why, unless a restart would not mend it.

        No exit code says that work is over, which only the log does: a worker that ends while the run goes on is started again. A trainer
        that was told by a signal to drain is not: who signals it wants the run to stop.
        """
        first = sorted(group, key=lambda child: (child.code == Exit.DONE, child.ended_s))
        fenced = next((child for child in first if child.code == Exit.FENCED), None)
        final = next((child for child in first if child.code in _FINAL), None)
        drained = next((child for child in first if child.code == Exit.DRAINED and child.kind in PROCESS_GROUPS), None)
        if fenced is not None or (drained is not None and final is None):
            for child in group:
                child.state = "drained" if fenced is None else "fenced"
            if fenced is not None:
                self._note(f"{fenced.name} stopped: another {fenced.kind} has taken over")
            return
        if final is not None:
            raise self._gave_up(final, f"{final.name} {_FINAL[final.code]}")
        self._restart(group, first[0])

    def _restart(self, group: Sequence[Child], failed: Child) -> None:
        ended_with = self._ending(failed)
        now_s = self._clock()
        count = group[0].failures.add(now_s)
        if count > self._config.max_restarts:
            raise self._gave_up(failed, f"{failed.name} ended {count} times within {self._config.window_s:g} s, last with {ended_with}")
        seconds = pause_s(count, first_s=self._config.backoff_s, most_s=MAX_BACKOFF_S)
        for child in group:
            child.state = "waiting"
            child.resume_s = now_s + seconds
        all_of_them = f" of all {len(group)} {group[0].kind}s" if len(group) > 1 else ""
        said = self._last_line(failed)
        failed.said = f"{ended_with}; {said}" if said else ended_with
        self._note(f"{failed.name} ended with {ended_with}; restart {count}{all_of_them} in {seconds:g} s{_log_ends(said)}")

    def _ending(self, child: Child) -> str:
        ended = describe_exit(child.code or 0) + _EARLY.get(child.code, "")
        return f"{ended} ({child.why})" if child.why else ended

    def _last_line(self, child: Child) -> str:
        """What it said last, which is most often why; one that was killed for its silence has its stacks there."""
        lines = [] if child.why else [line.strip() for line in self._launcher.tail(child.name).splitlines() if line.strip()]
        # What an error says stands before its hint.
        said = "; ".join(lines[-2:] if lines[-1:] and lines[-1].startswith("hint: ") else lines[-1:])
        return said[:_LINE_CHARS]

    def _gave_up(self, child: Child, message: str) -> LaunchError:
        tail = self._launcher.tail(child.name)
        said = f"; the end of its log:\n{tail}" if tail else "; it has said nothing"
        return LaunchError(
            message + said,
            hint=f"the whole log is logs/{child.name}.log in the run directory; mend it and run `up` again",
            worker=child.name,
        )


def _log_ends(said: str) -> str:
    return f"; its log ends: {said}" if said else ""
