"""Tools that a model has called, run side by side with a time limit and retries; whatever they do, the model gets an answer.

Plain functions run in threads of their own: one that never returns costs its thread, and neither the rollout nor the pool of threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from streamrl.data.tool_calls import ToolCall
from streamrl.errors import EngineError, ToolError
from streamrl.producers.turns import Turn

Log = logging.Logger | logging.LoggerAdapter[Any]
Tool = Callable[..., Any]
MAX_HUNG = 64
"""Calls beyond their limit that go on in a process: plain functions cannot be stopped, and `async` ones may refuse. With so many of them
rollouts fail that call a tool."""
_AT_ONCE = 16
_GRACE_S = 1.0
"""For a tool that is cancelled to end."""
_PAUSE_S = 0.1
"""Before the first retry; each later one waits twice as long."""
_ERROR_CHARS = 500
_hung: set[object] = set()


def num_hung() -> int:
    """Calls beyond their limit that go on in this process."""
    return len(_hung)


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one call."""

    call: ToolCall | None
    """None: it was malformed."""
    text: str
    """What the model is told."""
    error: str = ""
    """Why the tool gave nothing; empty: it did."""
    attempts: int = 0
    """0: there was nothing to call."""
    seconds: float = 0.0


async def run_calls(turn: Turn, tools: Mapping[str, Tool], *, timeout_s: float, retries: int, max_chars: int, log: Log) -> list[ToolResult]:
    """The results in the order of the calls, then those of broken calls.

    Raises:
        ToolError: too many calls hang in this process.
        EngineError: a tool raised it.
    """
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(call: ToolCall) -> ToolResult:
        async with free:
            return await _run(call, tools, timeout_s, retries, max_chars, log)

    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(call)) for call in turn.tool_calls]
    except* (EngineError, ToolError) as errors:
        raise errors.exceptions[0] from None
    broken = [(each.problem, f"Error: this call cannot be read: {each.problem}") for each in turn.malformed]
    return [*(task.result() for task in running), *(ToolResult(call=None, text=text, error=problem) for problem, text in broken)]


def fail_on(results: Sequence[ToolResult]) -> None:
    """Raise ToolError for the first that gave nothing."""
    for result in results:
        if result.error:
            name = "that was called" if result.call is None else result.call.name
            raise ToolError(f"the tool {name} gave nothing: {result.error}", hint="without fail=True the model is told, and may go on")


def result_message(text: str, call: ToolCall | None) -> dict[str, Any]:
    """A result as a message for the chat template."""
    named = {} if call is None else {"name": call.name} | ({"tool_call_id": call.id} if call.id else {})
    return {"role": "tool", "content": text, **named}


async def _run(call: ToolCall, tools: Mapping[str, Tool], timeout_s: float, retries: int, max_chars: int, log: Log) -> ToolResult:
    tool = tools.get(call.name)
    if tool is None:
        known = ", ".join(sorted(tools)) or "none"
        return _refused(call, f"there is no tool {call.name[:100]!r}; there are: {known}")
    try:
        inspect.signature(tool).bind(**call.arguments)
    except TypeError as error:
        return _refused(call, f"wrong arguments: {error}")
    except ValueError:  # a function of C that says nothing of its arguments
        pass
    began, error = time.monotonic(), ""
    for attempt in range(1, retries + 2):
        given, error = await _attempt(tool, call.arguments, timeout_s)
        if not error:
            text, error = _text(given, max_chars)
            if not error:
                return ToolResult(call=call, text=text, attempts=attempt, seconds=time.monotonic() - began)
        log.warning("event=tool_failed tool=%s attempt=%d of=%d error=%s", call.name, attempt, retries + 1, error)
        if attempt <= retries:
            await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
    return ToolResult(call=call, text=f"Error: {error}", error=error, attempts=retries + 1, seconds=time.monotonic() - began)


def _refused(call: ToolCall, why: str) -> ToolResult:
    why = why.encode(errors="replace").decode()[:_ERROR_CHARS]
    return ToolResult(call=call, text=f"Error: {why}", error=why)


async def _attempt(tool: Tool, arguments: Mapping[str, Any], timeout_s: float) -> tuple[Any, str]:
    """What it gave, and why it gave nothing."""
    if len(_hung) >= MAX_HUNG:
        raise ToolError(
            f"{MAX_HUNG} calls of tools hang in this process beyond their limit, so no further one is begun",
            hint="a tool that waits should be `async def`, or give up by itself",
        )
    asynchronous = inspect.iscoroutinefunction(tool) or inspect.iscoroutinefunction(getattr(tool, "__call__", None))  # noqa: B004
    work = _caught(lambda: tool(**arguments)) if asynchronous else _in_own_thread(lambda: tool(**arguments))
    task = asyncio.get_running_loop().create_task(work)
    try:
        if not (await asyncio.wait([task], timeout=timeout_s))[0]:
            task.cancel()
            if not (await asyncio.wait([task], timeout=_GRACE_S))[0]:
                _hung.add(task)
                task.add_done_callback(_hung.discard)
            return None, f"it has not answered within {timeout_s:g} s"
    finally:
        task.cancel()
    return (None, "it was cancelled") if task.cancelled() else task.result()


async def _caught(call: Callable[[], Awaitable[Any]]) -> tuple[Any, str]:
    try:
        return await call(), ""
    except (asyncio.CancelledError, EngineError):
        raise
    except BaseException as error:  # written policy: whatever a tool raises, `SystemExit` too, is told to the model
        return None, _said(error)


async def _in_own_thread(call: Callable[[], Any]) -> tuple[Any, str]:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[Any, str]] = loop.create_future()

    def settle(outcome: tuple[Any, str] | EngineError) -> None:
        _hung.discard(done)
        if done.done():
            return
        if isinstance(outcome, EngineError):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)

    def work() -> None:
        try:
            outcome = call(), ""
        except EngineError as error:
            outcome = error
        except BaseException as error:  # as above
            outcome = None, _said(error)
        with contextlib.suppress(RuntimeError):  # the loop has ended before it
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tool", daemon=True).start()
    try:
        return await done
    except asyncio.CancelledError:
        _hung.add(done)
        raise


def _text(given: Any, max_chars: int) -> tuple[str, str]:
    """What a tool gave as a text, and why it cannot be one."""
    if not isinstance(given, str):
        try:
            given = "" if given is None else msgspec.json.encode(given).decode()
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            return "", f"its result is no text and no JSON: {error}"[:_ERROR_CHARS]
    text = given.encode(errors="replace").decode() if not given.isascii() else given
    return (text if len(text) <= max_chars else f"{text[:max_chars]}\n[cut: {len(text)} characters]"), ""


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException as worse:  # the tool's own class of errors
        text = f"its text cannot be had: {type(worse).__name__}"
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return said.encode(errors="replace").decode()[:_ERROR_CHARS]
