"""The child: loads the user's code once, runs the calls that the parent begins, and says what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from streamrl.config.tree import RewardConfig
from streamrl.errors import ConfigError, EngineError, SchemaError, StreamRLError
from streamrl.producers.children import frames
from streamrl.producers.children.canary import Canary, OwnTask
from streamrl.producers.children.main_thread import MainThread, Wear
from streamrl.producers.children.output import LineBudget, Lines, LogLines
from streamrl.producers.children.pipes import FrameReader
from streamrl.producers.children.remote import Asking, current, in_thread
from streamrl.producers.children.returned import settled, valued
from streamrl.producers.children.watchdog import Watchdog
from streamrl.producers.functions import FunctionProducer, describe, make_producer
from streamrl.producers.protocol import Context, Failure
from streamrl.rewards.factory import make_reward
from streamrl.sandbox.sandbox import waits_for_slot

if TYPE_CHECKING:
    from streamrl.data.tokenizer import Tokenizer

logger = logging.getLogger("streamrl.producers.user")

_MAX_THREADS = 128
"""Plain functions that run at once; more of them wait for one to end."""
_STACK_BYTES = 2 << 20
_NOBODY = Asking(0, lambda frame: None, ())
"""In place of a call, for tasks of this process's own."""


class Link:
    """The way up, for any thread: a frame is written whole, or refused before a byte of it is."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def send(self, frame: frames.Said) -> None:
        """Raises SchemaError for what is too large or cannot be written; ends the process when the parent is gone."""
        data = frames.checked(frame)
        if os.getpid() != self._pid:
            return  # a copy that user code has forked says nothing, least of all into the middle of a frame
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError:
            os._exit(0)


class Host:
    """Runs calls in one event loop, and plain functions in threads beside it."""

    def __init__(self, hello: frames.Hello, link: Link) -> None:
        self._hello = hello
        self._send = link.send
        self._asking: dict[int, Asking] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._pong: asyncio.Task[None] | None = None
        self._tokenizer = _tokenizer(hello.model_dir) if hello.function else None
        self._producer = make_producer(hello.function, key=hello.function_key, in_thread=in_thread) if hello.function else None
        config = RewardConfig(kind=hello.reward, options=hello.reward_options, key=hello.reward_key)
        self.main_thread = MainThread()
        self.plain = False
        """Whether the reward runs in the main thread."""
        self._reward = make_reward(config, in_thread=self._beside, by_row=hello.by_row) if hello.reward else None
        self.plain = getattr(self._reward, "plain", False)
        if self.plain:
            self.main_thread.listen()
        self.by_rollout = isinstance(self._producer, FunctionProducer)
        self.by_episode = getattr(self._reward, "by_episode", False)
        self._wear = Wear()
        self.is_open = False
        """The parent has been told that the user's code is loaded."""
        plain = isinstance(self._producer, FunctionProducer) and self._producer.plain
        self._canary = Canary(tokenizer=self._tokenizer, plain=plain, scores=self._reward is not None)

    async def _beside(self, function: Callable[[], Any]) -> Any:
        return await (self.main_thread.run(function) if self.plain else in_thread(function))

    def take(self, frame: frames.Down) -> None:
        """Do what the parent says."""
        match frame:
            case frames.Ping():
                self._pong = OwnTask(self._answer(frame.number), asking=_NOBODY, is_call=True, loop=asyncio.get_running_loop())
            case frames.Given() | frames.Answer():
                if asking := self._asking.get(frame.call):
                    asking.heard(frame)
            case frames.RollOut():
                for begin in frame.begins:
                    asking = self._asking[begin.call] = Asking(begin.call, self._send, begin.turns)
                    self._begin(asking, self._roll_out(asking, frame, begin))
            case frames.Score():
                asking = self._asking[frame.call] = Asking(frame.call, self._send, ())
                self._begin(asking, self._score(asking, frame))
            case frames.Cancel():
                if frame.call in self._tasks:
                    self._asking[frame.call].cancel()
                    # Later than its first step: a task that is cancelled before says nothing at all, and the parent waits for it.
                    asyncio.get_running_loop().call_soon(self._tasks[frame.call].cancel)
            case frames.Hello():
                raise SchemaError("a child is told once who it is")

    def _begin(self, asking: Asking, work: Coroutine[Any, Any, None]) -> None:
        current.set(asking)
        waits_for_slot.set(asking.waits_for_slot)
        # The task copies the context, so everything that the call does knows whose it is.
        task = self._tasks[asking.call] = OwnTask(work, asking=asking, is_call=True, loop=asyncio.get_running_loop())
        current.set(None)
        waits_for_slot.set(None)
        task.add_done_callback(lambda task: self._is_over(asking, task))

    def _is_over(self, asking: Asking, task: asyncio.Task[None]) -> None:
        """See that the parent, which waits for it, has been told of a call's end."""
        if asking.call in self._tasks:
            error = None if task.cancelled() else task.exception()
            said = "was cancelled" if error is None else f"raised {describe(error)}"
            self._send(frames.Faulty(f"a call ended without a word: it {said}"))

    async def open(self) -> None:
        """Tell the parent that the user's code is loaded, once a canary call has shown that calls can be made beside it."""
        if why := await self._canary.sing():
            problem = ConfigError(why, hint="what does it change at import that is not its own?")
            self._send(frames.Broken(frames.Problem.of(problem), self._hello.function_key))
        else:
            self._send(frames.Ready(self.by_rollout, self.by_episode, self.plain))
            self.is_open = True

    async def _answer(self, number: int) -> None:
        if why := await self._sing():
            self._send(frames.Faulty(why))
        else:
            self._send(frames.Pong(number))

    async def _sing(self) -> str:
        return await self._canary.sing(self.main_thread.run if self.plain and self.main_thread.is_free else None)

    async def _roll_out(self, asking: Asking, frame: frames.RollOut, begin: frames.Begin) -> None:
        assert self._tokenizer is not None
        context = Context(
            engine=asking,
            tokenizer=self._tokenizer,
            task=frame.task,
            seed=frame.task.seed,
            options=self._hello.options,
            log=logger,
            max_len=self._hello.max_len,
            chat_template=self._hello.chat_template,
            template_kwargs=self._hello.template_kwargs,
            tool_calls=self._hello.tool_calls,
            resumes=begin.resumes,
            store=asking.store,
            images=asking.image,
        )
        if begin.rollout is not None:
            context = context.for_rollout(begin.rollout)
        given, error = await self._guarded(asking, frame.task.index, begin.rollout, lambda: self._produce(asking, context))
        ended = frames.Ended(call=asking.call)
        rollouts = range(frame.task.num_rollouts) if begin.rollout is None else [begin.rollout]
        if isinstance(error, EngineError):
            ended = frames.Ended(call=asking.call, problem=frames.Problem.of(error))
        elif error is not None:
            ended = frames.Ended(call=asking.call, failures=tuple(Failure(k, "failed", describe(error)) for k in rollouts))
        elif given is not None:
            ended = settled(asking, given, rollouts)
        failed = error is not None or any(failure.reason == "failed" for failure in ended.failures)
        fault = await self._fault(asking, ended, error) if failed else None
        self._end(ended, fault, lambda why: frames.Ended(call=asking.call, failures=tuple(Failure(k, "failed", why) for k in rollouts)))

    async def _produce(self, asking: Asking, context: Context) -> Any:
        producer = self._producer
        assert producer is not None
        if isinstance(producer, FunctionProducer):
            if not producer.plain:
                asking.began()
            return await producer.one(context.task, context)
        asking.began()
        return await producer.rollout(context.task, context)

    async def _score(self, asking: Asking, frame: frames.Score) -> None:
        reward = self._reward
        assert reward is not None
        if not self.plain:
            asking.began()
        rollout = frame.episodes[0].rollout if self.by_episode else None
        given, error = await self._guarded(asking, frame.task.index, rollout, lambda: reward.score(frame.task, frame.episodes))
        scored = frames.Scored(asking.call)
        if error is not None:
            scored = frames.Scored(asking.call, error=describe(error))
        elif given is not None:
            scored = valued(asking.call, given, len(frame.episodes))
            error = next((one for one in given if isinstance(one, MemoryError)), None)
        if left := self._wear.tell(error):
            logger.warning("event=grader_leaves what=%r action=its process is replaced", left)
            scored = msgspec.structs.replace(scored, worn=True)
        failed = error is not None or any(value.error for value in scored.values)
        if failed or asking.cancelled:
            fault = await self._fault(asking, scored, error)
        else:
            fault = frames.Faulty(why, scored) if (why := self._canary.misjudges()) else None
        self._end(scored, fault, lambda why: frames.Scored(asking.call, error=why))

    async def _fault(self, asking: Asking, ended: frames.Ended | frames.Scored, error: BaseException | None) -> frames.Faulty | None:
        """Why a call that has failed may not be to blame for it."""
        if isinstance(error, EngineError) or asking.cancelled:
            return None
        if isinstance(error, asyncio.CancelledError) and asking.disturbed_by is not None:
            return frames.Faulty("user code has cancelled tasks of another call", ended, asking.disturbed_by)
        why = await self._sing()
        return frames.Faulty(why, ended) if why and not asking.cancelled else None

    async def _guarded(
        self, asking: Asking, task: int, rollout: int | None, call: Callable[[], Awaitable[Any]]
    ) -> tuple[Any, BaseException | None]:
        """What user code gives or raises: (None, None) when the parent has cancelled it. `sys.exit` and its kind are errors like others."""
        asking.task, asking.rollout = task, rollout
        try:
            given = await call()
        except BaseException as error:
            if asking.cancelled:
                return None, None
            if not isinstance(error, EngineError):
                logger.warning("event=user_code_failed error=%s", describe(error), exc_info=error)
            return None, error
        return given, None

    def _end(self, frame: frames.Ended | frames.Scored, fault: frames.Faulty | None, failed: Callable[[str], frames.Said]) -> None:
        self._asking.pop(frame.call, None)
        self._tasks.pop(frame.call, None)
        try:
            self._send(fault or frame)
        except SchemaError as error:
            self._send(failed(error.message))


def _tokenizer(model_dir: str) -> Tokenizer:
    """Load it, and what it needs, where rollouts are run: graders start without."""
    from streamrl.data.tokenizer import load_tokenizer

    return load_tokenizer(Path(model_dir))


def run(down: int, up: int) -> None:
    """Serve the parent until it closes its end."""
    link = Link(up)
    capture(link)
    faulthandler.enable(all_threads=False)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    threading.stack_size(_STACK_BYTES)
    loop.set_default_executor(ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix="user-code"))
    host: list[Host] = []
    opening: list[OwnTask] = []
    watchdog = Watchdog(loop, link.send)

    def take(body: bytes) -> None:
        frame = frames.down_decoder.decode(body)
        if host:
            host[0].take(frame)
        elif isinstance(frame, frames.Hello) and (loaded := load(frame, link)):
            host.append(loaded)
            opening.append(OwnTask(opened(loaded), asking=_NOBODY, is_call=True, loop=loop))

    async def opened(loaded: Host) -> None:
        await loaded.open()
        if loaded.plain:
            loop.stop()
        else:
            watchdog.start()

    connecting = loop.create_task(
        loop.create_unix_connection(lambda: FrameReader(take, lambda: os._exit(0), max_bytes=0), sock=socket.socket(fileno=down))
    )
    _turn(loop, lambda: connecting.done() and bool(host) and host[0].is_open and host[0].plain)
    # What runs in the main thread is plain functions; the loop goes on beside it, has none of the user's code, and needs no watchdog.
    threading.Thread(target=_turn, args=(loop, lambda: False), name="loop", daemon=True).start()
    with _ending():
        host[0].main_thread.serve()


def _turn(loop: asyncio.AbstractEventLoop, ends: Callable[[], bool]) -> None:
    """Run the loop, whoever stops it: a task of user code that raises SystemExit or KeyboardInterrupt does, and the others go on."""
    with _ending():
        while not ends():
            try:
                loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                logger.warning("event=user_code_failed error=%s", describe(error))


@contextlib.contextmanager
def _ending() -> Generator[None]:
    """End the process with what serves in it: threads of user code would keep it, and nobody would hear what it is told."""
    try:
        yield
    except BaseException as error:
        logger.error("event=child_broken error=%s", describe(error), exc_info=error)
        os._exit(1)


def load(hello: frames.Hello, link: Link) -> Host | None:
    """The user's code, ready to be called; None after the parent was told why not."""
    if hello.memory_bytes and hasattr(resource, "RLIMIT_DATA"):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        with contextlib.suppress(ValueError):  # already limited to less
            resource.setrlimit(resource.RLIMIT_DATA, (hello.memory_bytes, hard))
    try:
        host = Host(hello, link)
    except BaseException as error:
        told = error if isinstance(error, StreamRLError) else ConfigError(f"user code cannot be loaded: {describe(error)}")
        link.send(frames.Broken(frames.Problem.of(told), str(told.values.get("key", hello.function_key))))
        return None
    return host


def capture(link: Link) -> None:
    """Have what is printed and logged go to the worker's log, with task and rollout where they are known."""
    budget = LineBudget()

    def put(line: frames.Line) -> None:
        asking = current.get()
        place = "" if asking is None else f"task={asking.task} " + ("" if asking.rollout is None else f"rollout={asking.rollout} ")
        for text in budget.take(line.text):
            # What cannot be written as UTF-8 is no reason to fail a print.
            link.send(frames.Line(line.logger, line.level, plain(place + text), plain(line.traceback)))

    def printed(text: str) -> None:
        put(frames.Line("streamrl.producers.user", logging.INFO, f"event=printed {text}"))

    def plain(text: str) -> str:
        return text.encode(errors="replace").decode()

    raw = os.fdopen(1, "wb", buffering=0, closefd=False)
    sys.stdout = sys.stderr = Lines(printed, raw)  # type: ignore[assignment]
    logging.basicConfig(level=logging.INFO, handlers=[LogLines(put)], force=True)
    logging.captureWarnings(True)
