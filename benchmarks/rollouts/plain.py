"""A plain HTTP client: the same prompts, as many requests at once, and nothing done with the answers but decoding them."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.processes import cpu_by_process
from streamrl.engines.sglang.client import SglangClient
from streamrl.engines.sglang.server import Loads
from streamrl.engines.wire import Result, ServerInfo
from streamrl.errors import EngineError, LaunchError
from streamrl.schemas.tasks import RolloutTask

_PATIENCE_S = 600.0
"""Longest that one answer may take."""
_LOOK_S = 0.5
_PROGRAM = "sglang.launch_server"


class Address(msgspec.Struct, frozen=True):
    """The address of a server and the key that it asks of its clients."""

    url: str
    key: str
    sglang: bool
    """True for SGLang's own server, false for one of ours."""


def body_of(task: RolloutTask, *, grouped: bool) -> dict[str, Any]:
    """The request for an answer to a task's prompt, with log-probs; `grouped`: for all of its answers."""
    sampling = task.sampling
    params = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "ignore_eos": sampling.ignore_eos,
        **sampling.later(),
    }
    prompt = list(task.prompt_ids)
    return {
        "input_ids": [prompt] * task.num_rollouts if grouped else prompt,
        "sampling_params": params,
        "return_logprob": True,
    }


async def ask(addresses: Sequence[Address], tasks: Sequence[RolloutTask], *, tasks_at_once: int, grouped: bool) -> tuple[int, int]:
    """Have the servers answer all tasks, `num_rollouts` times each; returns how many answers and tokens came.

    Args:
        addresses: asked in turn.
        tasks: with prompts, numbers of rollouts and sampling.
        tasks_at_once: how many tasks' answers are asked for at a time.
        grouped: ask for all answers to a prompt in one request, else for each in its own.

    Raises:
        EngineError: a server does not answer, or not with what was asked for.
    """
    clients = [SglangClient(address.url, address.key, name=f"plain-{number}") for number, address in enumerate(addresses)]
    answers = tokens = 0
    requests = iter([task for task in tasks for _ in range(1 if grouped else task.num_rollouts)])
    turns = itertools.cycle(clients)

    async def lane() -> None:
        nonlocal answers, tokens
        for task in requests:
            body, kind = body_of(task, grouped=grouped), list[Result] if grouped else Result
            found: Any = await next(turns).post("/generate", body, timeout_s=_PATIENCE_S, expect=kind)
            rows: list[Result] = found if grouped else [found]
            for row in rows:
                got = row.meta_info.completion_tokens
                if len(row.meta_info.output_token_logprobs or ()) != got:
                    raise EngineError(f"expected a log-prob for each of {got} tokens, got another number")
                answers, tokens = answers + 1, tokens + got

    lanes = tasks_at_once * (1 if grouped else max(task.num_rollouts for task in tasks))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(lanes):
                group.create_task(lane())
    except* EngineError as errors:
        raise errors.exceptions[0] from None
    finally:
        for client in clients:
            await client.close()
    return answers, tokens


def sglang_addresses(root: int) -> list[Address]:
    """The SGLang servers among the descendants of a process, by what their command lines say."""
    found: list[Address] = []
    for pid in sorted(cpu_by_process(root)):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if _PROGRAM in words and "--port" in words:
            found.append(address_of(words))
    return list(dict.fromkeys(found))


def address_of(words: Sequence[str]) -> Address:
    """The server that a command line starts; raises LaunchError when its key cannot be read."""
    given = {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}
    path = given.get("--config", "")
    try:
        key = re.search(r'api-key: "([0-9a-f]+)"', Path(path).read_text())
    except OSError as error:
        raise LaunchError(f"expected SGLang's key in {path}: {error}", hint="is the server this user's?") from error
    return Address(f"http://127.0.0.1:{given['--port']}", key[1] if key else "", sglang=True)


class Watch:
    """Looks at servers and processors while it is open."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._loads: list[tuple[int, int]] = []

    @asynccontextmanager
    async def open(self, addresses: Sequence[Address], names: Mapping[int, str]) -> AsyncGenerator[None]:
        """Look until left.

        Args:
            addresses: of servers, asked for what they compute and what waits there.
            names: of processes, by id; other descendants of this one are called as their programs are.
        """
        before, began_s = cpu_by_process(os.getpid()), time.monotonic()
        looking = asyncio.create_task(self._look(addresses))
        try:
            yield
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)
        seconds = time.monotonic() - began_s
        for pid, spent_s in cpu_by_process(os.getpid()).items():
            name = "cpu/" + ("bench" if pid == os.getpid() else names.get(pid) or _program(pid))
            self.values[name] = self.values.get(name, 0.0) + (spent_s - before.get(pid, 0.0)) / seconds
        if self._loads:
            running, waiting = (sum(column) / len(self._loads) for column in zip(*self._loads, strict=True))
            self.values |= {"running": running, "waiting": waiting}

    async def _look(self, addresses: Sequence[Address]) -> None:
        clients = [SglangClient(address.url, address.key, name="watched") for address in addresses]
        try:
            while clients:
                await asyncio.sleep(_LOOK_S)
                loads = [await _load(client, address) for client, address in zip(clients, addresses, strict=True)]
                self._loads.append((sum(running for running, _ in loads), sum(waiting for _, waiting in loads)))
        finally:
            for client in clients:
                await client.close()


async def _load(client: SglangClient, address: Address) -> tuple[int, int]:
    """Completions that are computed, and that wait."""
    if not address.sglang:
        info = await client.get("/server_info", timeout_s=_PATIENCE_S, expect=ServerInfo)
        return info.running, info.waiting
    loads = (await client.get("/v1/loads?include=core", timeout_s=_PATIENCE_S, expect=Loads)).loads
    return sum(load.num_running_reqs for load in loads), sum(load.num_waiting_reqs for load in loads)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"
