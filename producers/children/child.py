"""The parent's handle of one child: a process group of its own that is started, asked, watched and killed.

The watch counts time in ticks: a tick that comes late counts no more than a few, so that time in which this process or the whole machine
stood still (SIGSTOP, suspend) is nobody's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable

import msgspec

from streamrl.errors import ConfigError, LaunchError, SchemaError
from streamrl.producers.children import frames
from streamrl.producers.children.calls import Call, Limits
from streamrl.producers.children.cores import Cores
from streamrl.producers.children.main_thread import END_SIGNAL
from streamrl.producers.children.output import LineBudget, pass_on
from streamrl.producers.children.pipes import FrameReader, LineReader
from streamrl.runtime.service import describe_exit

logger = logging.getLogger(__name__)

TICK_S = 0.25
_UNANSWERED_S = 1.0
"""From here on an unanswered ping means that something holds the loop."""
_LAST_WORDS_S = 1.0
"""That cancelled calls get to clean up before the process is ended."""
_NOTICE_S = 30.0


class Child:
    """One child. `lost` says why once it is of no use any more.

    Args:
        number: for people.
        hello: what it loads.
        limits: of its start and its answers.
        alone: it runs one task only, and the clock of its calls alone decides when it is killed.
    """

    def __init__(self, number: int, hello: frames.Hello, limits: Limits, *, alone: bool) -> None:
        self.number = number
        self.alone = alone
        self._one_task = alone
        """It runs nothing of others, which a plain reward's does, too, one after the other."""
        self.lost = ""
        """Why it ended."""
        self._ends = False
        self.killed = False
        """Whether it was ended for a limit, not by itself."""
        self.unclear = False
        """Whether it was killed for several calls of which one is to blame."""
        self.ready: asyncio.Future[frames.Ready] = asyncio.get_running_loop().create_future()
        self.num_jobs = 0
        """Tasks, or calls of graders, that have a seat in it."""
        self.worn = False
        """It is to be replaced: graders have left too much behind in it."""
        self.exit_code: int | None = None
        """Of its process, once it has been lost to its end: negative for a signal."""
        self.notice = ""
        """What holds its loop, for `status`."""
        self._limits = limits
        self._signals = False
        """Whether a signal ends what its main thread runs."""
        self._calls: dict[int, Call] = {}
        self._leaving: dict[int, float] = {}
        """Calls of tasks that were given back and have not ended yet, and the seconds since."""
        self._num_calls = 0
        self._pinged = self._ponged = 0
        self._silent_s = self._pending_s = 0.0
        self._held: frames.Held | None = None
        self._held_s = 0.0
        self._notice_s = 0.0
        self._start_s = 0.0
        self._budget = LineBudget()
        self._start(hello)

    def _start(self, hello: frames.Hello) -> None:
        down, theirs_down = socket.socketpair()
        up, theirs_up = socket.socketpair()
        alive, self._alive = os.pipe()
        given = [theirs_down.fileno(), theirs_up.fileno(), alive]
        try:
            # A session of its own is a process group of its own; `alive` ends with this process, and the group with it.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "streamrl.producers.children", *map(str, given)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=given,
                start_new_session=True,
            )
        except OSError as error:
            for end in (down, up):
                end.close()
            os.close(self._alive)
            raise LaunchError(f"a process for user code cannot be started: {error}", hint="is the limit of processes reached?") from error
        finally:
            theirs_down.close()
            theirs_up.close()
            os.close(alive)
        self.cores = Cores(self._process.pid)
        self._opening = asyncio.ensure_future(self._open(down, up, hello))

    async def _open(self, down: socket.socket, up: socket.socket, hello: frames.Hello) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(asyncio.Protocol, sock=down)
        self._up, _ = await loop.create_unix_connection(lambda: FrameReader(self._take, self._closed, max_bytes=frames.MAX_BYTES), sock=up)
        assert self._process.stdout is not None
        self._out, _ = await loop.connect_read_pipe(lambda: LineReader(self._printed), self._process.stdout)
        self.send(hello)

    async def started(self) -> frames.Ready:
        """Wait until the user's code is loaded; raises ConfigError when it cannot be."""
        await asyncio.shield(self._opening)
        return await asyncio.shield(self.ready)

    def send(self, frame: frames.Told) -> None:
        """Say something; a child that is gone hears nothing."""
        if not self.lost:
            self._transport.write(frames.packed(frame))

    # Calls

    @property
    def num_leaving(self) -> int:
        """Calls that were given up and have not ended yet."""
        return len(self._leaving)

    @property
    def leaving_s(self) -> float:
        """Since the first of them was; 0: there are none."""
        return max(self._leaving.values(), default=0.0)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def hung_s(self) -> dict[int, float]:
        """By task: how long its call that hangs longest has asked no engine."""
        found: dict[int, float] = {}
        for call in self._calls.values():
            if call.hung_s:
                found[call.task] = max(found.get(call.task, 0.0), call.hung_s)
        return found

    def begin(self, make: Callable[[int], Call], frame: Callable[[Call], frames.Told]) -> Call:
        """Make a call with the next number and tell the child to begin it."""
        self._num_calls += 1
        call = make(self._num_calls)
        if self.lost:
            call.end(None)
        else:
            self._calls[call.number] = call
            self.send(frame(call))
        return call

    async def wait(self, call: Call) -> object:
        """What a call came to (`Call`); cancelling this cancels the call, without waiting for its end."""
        try:
            return await call.done
        finally:
            if self._calls.pop(call.number, None) is not None:
                call.end(None)
                self._leaving[call.number] = 0.0
                self._cancel(call)

    def give_up(self, call: Call, why: str) -> None:
        """Have it end as TIMEOUT at once; its user code is given `Limits.answer_s` to end."""
        call.expired = why
        if self._calls.pop(call.number, None) is not None:
            logger.warning("event=user_code_timeout child=%d call=%d limit=%r", self.number, call.number, why)
            self._leaving[call.number] = 0.0
            self._cancel(call)
        call.end(None)

    def _cancel(self, call: Call) -> None:
        self.send(frames.Cancel(call.number))
        if self._signals and not self.lost and self._process.poll() is None:
            os.kill(self._process.pid, END_SIGNAL)

    def _end(self, call: Call, result: object) -> None:
        self._calls.pop(call.number, None)
        call.end(result)

    # What it says

    def _take(self, body: bytes) -> None:
        if self.lost:
            return
        try:
            frame = frames.up_decoder.decode(body)
        except (msgspec.MsgspecError, SchemaError, RecursionError, UnicodeDecodeError) as error:
            self.kill(f"it said what is no frame: {error}")
            return
        match frame:
            case frames.Pong():
                self._ponged, self._held = frame.number, None
            case frames.Held():
                if self._held is None or self._held.step != frame.step:
                    self._held_s = 0.0
                self._held = frame
                self._note(f"user code holds its event loop: {frame.place}")
            case frames.Slow():
                self._note(f"user code blocks its event loop: {frame.place}, {frame.seconds:.1f} s of the last 10")
            case frames.Faulty():
                self._faulty(frame)
            case frames.Line():
                pass_on(frame)
            case frames.Ready() if not self.ready.done():
                self._signals, self.alone = frame.plain, self.alone or frame.plain
                self.ready.set_result(frame)
            case frames.Broken() if not self.ready.done():
                self.ready.set_exception(ConfigError(frame.problem.message, hint=frame.problem.hint, key=frame.key))
                self.ready.exception()  # seen by `started` if anybody waits
            case frames.Ready() | frames.Broken():
                self.kill("it said twice that it is ready")
            case _:
                self._of_call(frame)

    def _of_call(self, frame: frames.OfCall) -> None:
        call = self._calls.get(frame.call)
        if isinstance(frame, frames.Scored) and frame.worn:
            self.worn = True
        if call is None:  # an abort came first: what it asks or gives now is nobody's
            if isinstance(frame, frames.Ended | frames.Scored):
                self._leaving.pop(frame.call, None)
            return
        match frame:
            case frames.Began():
                call.began = True
            case frames.Waits():
                call.wait_for_slot(frame.begins)
            case frames.Hush():
                call.hush(frame.turn)
            case frames.Ended() | frames.Scored():
                self._end(call, frame)
                if call.expired and self._held is None and self._silent_s > self._limits.answer_s:
                    self.killed = True  # what the call has done to its process, the next one would suffer
                    self._kill("it has not answered since a call went over its limit", [])
            case _:
                if not call.expired:
                    call.ask(frame)

    def _faulty(self, frame: frames.Faulty) -> None:
        """End it, as what its calls come to may not be their own: they go on elsewhere, but for one that was by itself all along."""
        ended = frame.ended
        if self._one_task and len(self._calls) == 1 and ended is not None and ended.call in self._calls:
            self._end(self._calls[ended.call], ended)
        self.unclear |= self._one_task and len(self._calls) > 1
        culprit = self._calls.get(frame.culprit) if frame.culprit is not None else None
        self._kill(frame.why, [culprit] if culprit is not None else [])

    def _note(self, text: str) -> None:
        if text.partition(",")[0] != self.notice.partition(",")[0]:
            logger.warning(
                "event=user_code_blocks child=%d %s hint=make it a plain function (def), or await what it waits for", self.number, text
            )
        self.notice, self._notice_s = text, 0.0

    def _printed(self, line: str) -> None:
        for allowed in self._budget.take(line):
            logger.info("event=user_output child=%d %s", self.number, allowed)

    # The watch

    def tick(self, seconds: float) -> None:
        """Count `seconds` of watched time: calls over their limit are cancelled, and a child that does not answer is killed."""
        if self.lost:
            return
        if (code := self._process.poll()) is not None:
            self.exit_code = code
            self._lose(f"its process ended with {describe_exit(code)}")
            return
        if not self.ready.done():
            self._start_s += seconds
            if self._start_s > self._limits.start_s:
                self.kill(f"it did not load the user's code within {self._limits.start_s:g} s")
            return
        self._listen(seconds)
        holder = self._held.call if self._held is not None else None
        granted_s = self._granted(seconds)
        for call in list(self._calls.values()):
            # While somebody holds the loop, nobody else can do anything; who it is may not be known.
            runs = not self._is_silent or holder == call.number or (self.alone and holder is None)
            if runs and call.tick(granted_s):
                logger.warning("event=user_code_timeout child=%d call=%d limit=%r", self.number, call.number, call.expired)
                self._cancel(call)
            elif call.expired:
                call.grace_s += seconds
        self._leaving = {number: since_s + seconds for number, since_s in self._leaving.items()}
        self._judge()

    def _listen(self, seconds: float) -> None:
        if self._pinged == self._ponged:
            self._silent_s, self._held_s = 0.0, 0.0
            # An idle process of plain functions is not woken: ten of them may stand beside those that work.
            if self._calls or self._leaving or not self._signals:
                self._pinged += 1
                self.send(frames.Ping(self._pinged))
        else:
            self._silent_s += seconds
            self._held_s += seconds
        self._notice_s += seconds
        if self._notice_s > _NOTICE_S:
            self.notice = ""

    @property
    def _is_silent(self) -> bool:
        return self._silent_s >= _UNANSWERED_S

    def _granted(self, seconds: float) -> float:
        """The time that calls have had: known once the loop has answered, or something is known to hold it."""
        self._pending_s += seconds
        if 0 < self._silent_s < _UNANSWERED_S:
            return 0.0
        granted_s, self._pending_s = self._pending_s, 0.0
        return granted_s

    def _judge(self) -> None:
        answer_s, held = self._limits.answer_s, self._held
        place = f": {held.place}" if held is not None else ""
        hung = [call for call in self._calls.values() if call.expired and call.grace_s > answer_s]
        expired = [call for call in self._calls.values() if call.expired]
        if hung and held is None and self._is_silent and len(expired) > 1:
            # Something holds the interpreter itself, so the child cannot say who; they run one after the other in the next one.
            self.unclear = True
            for call in expired:
                call.expired = ""
        if hung or any(since_s > answer_s for since_s in self._leaving.values()):
            self.killed = True
            self._kill(f"a call did not end within {answer_s:g} s of being cancelled{place}", hung)
        elif (not self.alone or self._is_nobodys(held)) and (self._held_s if held is not None else self._silent_s) > answer_s:
            self.killed = True
            self.unclear |= held is None and self._one_task and len(self._calls) > 1
            known = held is not None and (held.call in self._calls or held.call in self._leaving)
            blamed = [call for call in self._calls.values() if held is not None and call.number == held.call]
            self._kill(f"its event loop did not answer for {answer_s:g} s{place}", blamed if known else None)

    def _is_nobodys(self, held: frames.Held | None) -> bool:
        """True if no one call is known to hold the loop, so that no limit ends it: what one has left behind does, or any of several."""
        if held is not None:
            return held.call not in self._calls
        return len(self._calls) > 1 or not any(call.began for call in self._calls.values())

    def kill(self, why: str) -> None:
        """End it for something that one of its calls must have done."""
        self._kill(why, None)

    def _kill(self, why: str, blamed: Iterable[Call] | None) -> None:
        logger.warning("event=child_killed child=%d reason=%r", self.number, why)
        self._lose(why, blamed)

    def _lose(self, why: str, blamed: Iterable[Call] | None = None) -> None:
        """Say to everybody that it is gone; without anybody to blame, those who were not waiting for an engine may have done it."""
        if self.lost:
            return
        self.lost = why
        self._sweep()
        if not self.killed:
            logger.warning("event=child_lost child=%d calls=%d reason=%r", self.number, len(self._calls), why)
        for call in list(blamed) if blamed is not None else [call for call in self._calls.values() if call.began and not call.waits]:
            call.suspect = True
        for call in list(self._calls.values()):
            self._end(call, None)
        self._leaving.clear()
        if not self.ready.done():
            self.ready.set_exception(
                ConfigError(f"user code cannot be loaded: {why}", hint="import the file with python to see what it does at import")
            )
            self.ready.exception()

    def _closed(self) -> None:
        """Its end of the socket is closed: it is ending, or user code has closed what is not its own."""
        if not self.lost:
            self._closing = asyncio.ensure_future(self._bury())

    async def _bury(self) -> None:
        for _ in range(100):
            if self._process.poll() is not None:
                break
            await asyncio.sleep(0.01)
        code = self.exit_code = self._process.poll()
        self._lose("it closed its connection to the worker" if code is None else f"its process ended with {describe_exit(code)}")

    def _sweep(self) -> None:
        """Kill the whole group. The child's guard keeps the group's number taken until then."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it, once; calls that were cancelled get a moment to clean up."""
        if self._ends:
            return
        self._ends = True
        await asyncio.gather(self._opening, return_exceptions=True)
        waited_s = 0.0
        while (self._leaving or self._calls) and not self.lost and waited_s < _LAST_WORDS_S:
            await asyncio.sleep(0.02)
            waited_s += 0.02
        self.killed = True
        self._lose("the worker ends")
        while self._process.poll() is None:  # noqa: ASYNC110  # SIGKILL has been sent
            await asyncio.sleep(0.01)
        os.close(self._alive)
        self.cores.close()
        for transport in (self._transport, self._up, self._out):
            transport.close()
