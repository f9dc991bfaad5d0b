"""One SGLang server as a child process: started on loopback, watched, and gone before its worker is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.engines import EngineConfig
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.command import arguments, count_gpus, environment, holds_weights, interpreter, program, write_site
from streamrl.errors import EngineDied, EngineError, EngineUnavailable
from streamrl.system import dies_with_parent, write_private

logger = logging.getLogger(__name__)

FOLDER = "streamrl-sglang-"
"""Private folders are called this, the worker's process id, and something random."""
STARTS = 3
"""Tries when somebody else takes the port between its choice and its use."""
PORT_TAKEN = "ddress already in use"
"""What the log says then, with a capital or without."""
POLL_S = 0.1
CHECK_EVERY_S = 2.0
SILENCE_S = 60.0
"""Time in which the schedulers may leave a question unanswered (a long prompt on a slow machine), before the server counts as dead."""

_MEMORY = re.compile(r"/dev/shm/(?:sglang_loads_|sgl_shm_mq_|sem\.mp-)\S+")
"""Where SGLang's schedulers write their load, its queues, and semaphores of its processes."""
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)\b.*", re.MULTILINE)
"""The last line of a traceback."""
_NOTED = "shared-memory"
"""A file in the private folder: paths of shared memory, one a line, to be removed with the folder."""


class Load(msgspec.Struct):
    """One group of schedulers in `GET /v1/loads`."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class Loads(msgspec.Struct):
    """`GET /v1/loads`."""

    loads: list[Load] = []


class SglangServer:
    """A server's life: `start` once, then `ended` says when it is over; `stop` in any case.

    It is watched by the event loop that `start` ran on; `detach` there and `attach` on another one move it.

    Args:
        config: `slots`, `deterministic` and the section `sglang`.
        model_dir: a Hugging Face model directory.
        name: of the engine, for logs and errors.
        max_len: longest sequence in tokens.
        dtype: type of the weights as they are published.
        index: number of the engine worker, which decides its GPUs.
        log_path: what the server writes; None: its private folder, gone with it.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_dir: Path,
        *,
        name: str,
        max_len: int,
        dtype: str,
        index: int = 0,
        log_path: Path | None = None,
    ) -> None:
        self._config = config
        self.model_dir = model_dir.absolute()
        self._name = name
        self._max_len = max_len
        self._dtype = dtype
        self._index = index
        # Short: paths of unix sockets have about a hundred characters.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        """Folder of this server alone, readable by its owner only: the plugin's sockets, the api key."""
        self.log_path = log_path or self.directory / "server.log"
        self._log_start = 0
        # Hex digits: SGLang puts what its configuration file says into a command line, where a value must not begin with a dash.
        self._key = secrets.token_hex(32)
        self._process: subprocess.Popen[bytes] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._over = asyncio.Event()
        self._reason: EngineUnavailable | None = None
        self.client = SglangClient("", self._key, name=name)
        self.version = ""
        """Of SGLang, once it runs."""
        self.start_s = 0.0
        self.load: dict[str, float] = {}
        """What the schedulers said last, by metric name."""

    @property
    def key(self) -> str:
        """The server's api key, for processes of this worker that speak with it directly."""
        return self._key

    @property
    def pid(self) -> int | None:
        """Process id, None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process lives and answers, as far as is known."""
        return self._process is not None and self._process.poll() is None and self._reason is None

    async def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            EngineError: no such interpreter, wrong flags, out of memory, or no answer within `start_timeout_s`; the log's end is in it.
        """
        began = time.monotonic()
        await asyncio.to_thread(remove_left_behind, self.directory.parent)
        site = await asyncio.to_thread(write_site, self.directory)
        for attempt in range(STARTS):
            try:
                await self._start(site)
                break
            except EngineError:
                await self._kill()
                await self.client.close()
                if PORT_TAKEN not in self._new_log() or attempt == STARTS - 1:
                    raise
                logger.warning("event=sglang_port_taken engine=%s", self._name)
        self.version = str((await self.client.get("/server_info", timeout_s=SILENCE_S, expect=dict[str, Any])).get("version", ""))
        self.start_s = time.monotonic() - began
        if self.pid is not None:
            await asyncio.to_thread(_note_memory, self.pid, self.directory)
        self.attach()
        logger.info("event=sglang_started engine=%s pid=%s version=%s seconds=%.1f", self._name, self.pid, self.version, self.start_s)

    def attach(self) -> None:
        """Watch the running server from the current event loop."""
        self._over = asyncio.Event()
        self._watch = asyncio.create_task(self._watching(), name=f"sglang-{self._name}")

    async def detach(self) -> None:
        """Watch it no more; it goes on."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
            self._watch = None
        await self.client.close()

    async def stop(self) -> None:
        """End the process and all it started, and remove the private folder."""
        await self.detach()
        self._end(EngineUnavailable(f"engine {self._name} was stopped", hint="ask another engine"))
        await self._kill()
        await asyncio.to_thread(_remove, self.directory)

    async def ended(self) -> EngineUnavailable:
        """Wait until the server is over; says why."""
        await self._over.wait()
        assert self._reason is not None
        return self._reason

    async def _start(self, site: Path) -> None:
        port = _free_port()
        secret = self.directory / "server.yaml"
        write_private(secret, f'api-key: "{self._key}"\n'.encode())
        sglang = self._config.sglang
        plugin = None
        if sglang.swap != "pause":
            plugin = {
                "dir": str(self.directory),
                "swap": sglang.swap,
                "isolate": sglang.isolate_prefixes,
                "record": sglang.record_forwards,
            }
        argv = arguments(
            self._config,
            self.model_dir,
            port=port,
            max_len=self._max_len,
            dtype=self._dtype,
            has_weights=holds_weights(self.model_dir),
            secret_file=secret,
        )
        env = environment(sglang, os.environ, site=site, plugin=plugin, index=self._index, num_gpus=count_gpus())
        python = interpreter(sglang)
        logger.info("event=sglang_starting engine=%s python=%s log=%s arguments=%s", self._name, python, self.log_path, " ".join(argv))
        self._spawn([python, "-W", "ignore::UserWarning", *program(sglang), *argv], env)
        await self.client.close()
        self.client = SglangClient(f"http://127.0.0.1:{port}", self._key, name=self._name)
        await self._until_ready()

    def _spawn(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._log_start = os.fstat(descriptor).st_size
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                env=dict(env),
                cwd=self.directory,
                start_new_session=True,
                # SGLang does the same for the processes that it starts, so all of them go when the worker goes, however it goes.
                preexec_fn=dies_with_parent(signal.SIGKILL),
            )
        except OSError as error:
            raise EngineError(
                f"expected engine.sglang.python to be an interpreter, got {command[0]!r}: {error.strerror}",
                hint="make an environment with SGLang (scripts/install.sh sglang-cpu, or pip install sglang) and name its python",
            ) from error
        finally:
            os.close(descriptor)

    async def _until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self._config.sglang.start_timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise self._failed_to_start(f"it ended with code {code}")
            with contextlib.suppress(EngineError):
                await self.client.get("/model_info", timeout_s=10.0, expect=dict[str, Any])
                # Only the schedulers can answer this; it also makes a GPU compile its kernels before the first request.
                warm = {"input_ids": [0, 0], "sampling_params": {"max_new_tokens": 2, "temperature": 0.0}, "return_logprob": True}
                await self.client.post("/generate", warm, timeout_s=max(1.0, deadline - time.monotonic()), expect=dict[str, Any])
                return
            await asyncio.sleep(POLL_S)
        raise self._failed_to_start(f"it did not answer within engine.sglang.start_timeout_s = {self._config.sglang.start_timeout_s:g}")

    def _failed_to_start(self, why: str) -> EngineError:
        text = self._new_log()
        hint = "see the whole log"
        if "No module named 'sglang'" in text or 'No module named "sglang"' in text or "No module named sglang" in text:
            hint = "SGLang is not installed there: name the python of an environment that has it in engine.sglang.python"
        elif "unrecognized arguments" in text:
            hint = "a flag in engine.sglang.flags that this version of SGLang does not know"
        elif "out of memory" in text.lower():
            hint = "lower engine.sglang.flags.mem_fraction_static: the second set of weights and graphs needs room beside the KV cache"
        return EngineError(
            f"SGLang at engine {self._name} did not start: {why}.{_cause(text)} The end of {self.log_path}: {_tail(text)}",
            hint=hint,
        )

    def _new_log(self) -> str:
        with contextlib.suppress(OSError), self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode("utf-8", "replace")
        return ""

    async def _watching(self) -> None:
        """Until the process has ended, or its schedulers have been silent for too long."""
        assert self._process is not None
        heard = asked = time.monotonic()
        while (code := self._process.poll()) is None:
            await asyncio.sleep(POLL_S)
            now = time.monotonic()
            if now - asked < CHECK_EVERY_S:
                continue
            asked = now
            try:
                self.load = _load(await self.client.get("/v1/loads?include=core", timeout_s=SILENCE_S, expect=Loads))
                heard = time.monotonic()
            except EngineError as error:
                logger.warning("event=sglang_silent engine=%s seconds=%.1f error=%s", self._name, time.monotonic() - heard, error.message)
            if time.monotonic() - heard >= SILENCE_S:
                self._end(self._death(f"its schedulers have not answered for {SILENCE_S:g} s"))
                await self._kill()
                return
        self._end(self._death(f"it ended with code {code}"))
        await self._kill()

    def _death(self, why: str) -> EngineDied:
        text = self._new_log()
        return EngineDied(
            f"SGLang at engine {self._name} has died: {why}.{_cause(text)} The end of {self.log_path}: {_tail(text)}",
            hint="a new one is started; if it dies again, see the whole log",
        )

    def _end(self, reason: EngineUnavailable) -> None:
        if self._reason is None:
            self._reason = reason
            if isinstance(reason, EngineDied):
                logger.error("event=sglang_died engine=%s message=%s", self._name, reason.message)
            self._over.set()

    async def _kill(self) -> None:
        """End all of the process group at once. Asked politely, SGLang waits for five seconds and kills its processes in the same way."""
        process = self._process
        if process is None:
            return
        await asyncio.to_thread(_note_memory, process.pid, self.directory)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        # Only now: whoever is cancelled above leaves the rest to the next caller.
        self._process = None


def remove_left_behind(place: Path) -> None:
    """Remove the private folders of workers that were killed."""
    for path in place.glob(f"{FOLDER}*"):
        pid = path.name.removeprefix(FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdecimal() and path.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                _remove(path)


def _note_memory(group: int, directory: Path) -> None:
    """Write down which files in shared memory SGLang's processes have: killed, they leave them there, and the names tell nothing."""
    held: set[str] = set()
    for process in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if process.name.isdecimal() and os.getpgid(int(process.name)) == group:
                held.update(_MEMORY.findall((process / "maps").read_text()))
    if held and directory.exists():
        with (directory / _NOTED).open("a") as file:
            file.writelines(f"{path}\n" for path in sorted(held))


def _remove(directory: Path) -> None:
    """Remove a private folder, and before it the shared memory that is noted there."""
    with contextlib.suppress(FileNotFoundError):
        for path in (directory / _NOTED).read_text().splitlines():
            Path(path).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _load(loads: Loads) -> dict[str, float]:
    return {
        "engine/server_running_requests": float(sum(load.num_running_reqs for load in loads.loads)),
        "engine/server_waiting_requests": float(sum(load.num_waiting_reqs for load in loads.loads)),
        "engine/kv_cache_used": max((load.token_usage for load in loads.loads), default=0.0),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _cause(text: str) -> str:
    """The first error that is written out: what follows it, of other processes of the server, is mostly its consequence."""
    found = _RAISED.search(text)
    return "" if found is None else f" First error: {found[0][:300]}."


def _tail(text: str) -> str:
    return " | ".join(line for line in text.strip().splitlines()[-6:] if line.strip())[-1500:] or "(nothing)"
