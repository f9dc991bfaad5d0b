"""The process of a guest: started in the environment with verifiers, told what to do, heard line by line."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ConfigError, LaunchError

INSTALL = "make verifiers makes .venv-verifiers, whose bin/python it may be; in another environment: pip install 'verifiers>=0.4,<0.5'"
_HOME = Path(__file__).with_name("guest")
_LINE_BYTES = 64 << 20
LAST_WORDS_S = 2.0
"""In which one that has closed its output ends."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """What a guest is told."""

    mode: str
    """`check`, `rows` or `serve`."""
    taskset: str
    """The name of one that is installed, or a file."""
    options: dict[str, Any]
    """`producer.options`."""
    model_dir: str = ""
    """Of the policy, for its tokenizer."""
    model: str = "policy"
    max_len: int = 0
    gateway: str = ""
    """`http://host:port`."""
    gateway_key: str = ""
    sessions: int = 0
    """That it plays at a time."""
    idle_s: float = 0.0
    """After which without a call an episode is given up."""
    adopted: tuple[dict[str, Any], ...] = ()
    """Sessions that an earlier guest has left behind, played from the beginning: the gateway gives the same call the same answer."""
    suspects: tuple[dict[str, Any], ...] = ()
    """Those that were open when one died. They are played before all others, one at a time."""


class Said(msgspec.Struct, frozen=True):
    """A line of its; one field is set."""

    error: str = ""
    done: bool = False
    beat: bool = False
    verifiers: str = ""
    row: dict[str, Any] = {}
    opened: dict[str, Any] = {}
    """A session that it has begun, as the gateway has given it."""
    ended: str = ""
    """Name of a session that it has ended."""


_decoder = msgspec.json.Decoder(Said)


class Guest:
    """A running one. It and all that it has started are a process group, which ends with it, and with this process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, and that of its group."""
        return self._process.pid

    async def lines(self) -> AsyncIterator[Said]:
        """What it says until it ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            try:
                yield _decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise LaunchError(f"expected a guest to say lines of JSON, got {line[:200]!r}") from error

    async def end(self, *, patience_s: float = 0.0) -> int:
        """End it, unless it ends by itself within `patience_s`; returns its exit code."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), patience_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self._process.wait()


@asynccontextmanager
async def guest(python: str, spec: Spec) -> AsyncGenerator[Guest]:
    """A guest that runs while open.

    Args:
        python: interpreter of the environment with verifiers.
        spec: what it does.

    Raises:
        ConfigError: there is no such interpreter.
    """
    path = os.pathsep.join(filter(None, (str(_HOME), os.environ.get("PYTHONPATH", ""))))
    try:
        process = await asyncio.create_subprocess_exec(
            python,
            "-m",
            "streamrl_guest",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            limit=_LINE_BYTES,
            start_new_session=True,
        )
    except OSError as error:
        raise ConfigError(
            f"expected producer.python to be an interpreter, got {python}: {error}", hint=INSTALL, key="producer.python"
        ) from error
    made = Guest(process)
    try:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already, and its exit code says so
            process.stdin.write(msgspec.json.encode(spec) + b"\n")
            await process.stdin.drain()
        yield made
    finally:
        await made.end()


def wrong(said: Said, taskset: str) -> ConfigError:
    """What a guest has found wrong with what it was told."""
    missing = "expected verifiers" in said.error or "expected the package verifiers" in said.error
    if missing:
        return ConfigError(f"producer.python: {said.error.partition(': ')[2]}", hint=INSTALL, key="producer.python")
    return ConfigError(
        f"producer.function = 'verifiers:{taskset}': the taskset cannot be used: {said.error}",
        hint="producer.options is verifiers' env block (docs/verifiers.md)",
        key="producer.function",
    )
