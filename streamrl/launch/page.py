"""The page beside an `up`: a process of its own, started again for ever. Whatever becomes of it, the run goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable

from streamrl.page.serving import address_of
from streamrl.runtime.kinds import inherited
from streamrl.runtime.retries import pause_s
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import SUPERVISOR_VARIABLE

logger = logging.getLogger(__name__)

_LOOK_S = 0.2
_FIRST_S, _MOST_S = 1.0, 60.0
_STOP_S = 3.0
_LONG_S = 60.0
"""One that has been up for this long did not fail at its start."""
_SAID_BYTES = 4096


@contextlib.asynccontextmanager
async def page_beside(run: RunDir, port: int, *, note: Callable[[str], None], tell: Callable[[str], None]) -> AsyncGenerator[None]:
    """Keep the page of `run` served while open; `tell` gets its address, which is secret, and `note` hears once that there is none."""
    keeping = asyncio.create_task(_keep(run, port, note, tell))
    try:
        yield
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def _keep(run: RunDir, port: int, note: Callable[[str], None], tell: Callable[[str], None]) -> None:
    failures, told, complained = 0, "", False
    while True:
        began_s = time.monotonic()
        code = 0
        try:
            process = _start(run, port)
        except OSError as error:
            logger.warning("event=page_not_started error=%s", error)
        else:
            try:
                while (exited := process.poll()) is None:
                    address = address_of(run, pid=process.pid)
                    if address and address != told:
                        tell(f"page: {address}")
                        told = address
                    await asyncio.sleep(_LOOK_S)
                code = exited
            finally:
                await _end(process)
        logger.warning("event=page_ended code=%d", code)
        failures = 1 if time.monotonic() - began_s > _LONG_S else failures + 1
        if not told and not complained:
            complained = True
            note(f"the page is not there: {_said(run)}; it is tried again, and the run goes on")
        await asyncio.sleep(pause_s(failures, first_s=_FIRST_S, most_s=_MOST_S))


def _start(run: RunDir, port: int) -> subprocess.Popen[bytes]:
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    surroundings = {**inherited(os.environ, "page"), **one, SUPERVISOR_VARIABLE: str(os.getpid())}
    command = (sys.executable, "-m", "streamrl", "page", str(run.path), "--port", str(port))
    with run.log_path("page").open("ab") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=surroundings, start_new_session=True)


async def _end(process: subprocess.Popen[bytes]) -> None:
    """It gets a moment; a page may have started a server to read with, which dies with it."""
    if process.poll() is None:
        process.terminate()
    try:
        await asyncio.to_thread(process.wait, _STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _said(run: RunDir) -> str:
    """What it said last."""
    try:
        with run.log_path("page").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _SAID_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
    except OSError:
        return "its log cannot be read"
    said = next((line for line in reversed(lines) if line.startswith("error: ")), lines[-1] if lines else "it has said nothing")
    return said.removeprefix("error: ")[:300]
