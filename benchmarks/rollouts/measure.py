"""`bench rollouts`: a sweep over SGLang's flags if it is asked for, then rounds of the stack and the plain clients on the same servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.raw import Fact, Record, Round, append, header, new_directory
from benchmarks.report import turn
from benchmarks.rollouts.flags import COMBINED, FLAG_SETS, SWEEP, best_of, combined, config_with, speeds_of, unknown_flags
from benchmarks.rollouts.plain import Address, Watch, ask, sglang_addresses
from benchmarks.rollouts.spec import (
    BEST,
    LEFT_OUT,
    PLAIN,
    SLOTS,
    STACK,
    TOGETHER,
    RolloutsSpec,
    config_of,
    in_flight,
    num_tasks,
    with_tokens,
)
from benchmarks.rollouts.stack import ENGINES, MAKERS, Stack, publish_first, roll, serving, started
from streamrl.config.secret_options import without_secrets
from streamrl.config.tree import Config
from streamrl.data.mixed import MixedRows
from streamrl.data.problems import TaskRows
from streamrl.data.streamed import open_task_rows
from streamrl.data.tokenizer import load_tokenizer
from streamrl.engines.sglang.command import interpreter
from streamrl.engines.sglang.server import SglangServer
from streamrl.errors import ConfigError, EngineError
from streamrl.launch.prepare import check_inputs
from streamrl.producers.feeder import plan_tasks
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.control import Grant
from streamrl.schemas.subjects import TASKS
from streamrl.schemas.tasks import RolloutTask

logger = logging.getLogger(__name__)

_ALONE = 0.8
"""Part of a sweep's time in which single sets are begun; the rest is for those that helped, together."""
PACKAGES = ("torch", "sglang", "aiohttp")
_LIST_FLAGS = """
import importlib.util, pathlib
root = pathlib.Path(importlib.util.find_spec("sglang").submodule_search_locations[0]) / "srt"
for path in (root / "server_args.py", *sorted((root / "arg_groups").rglob("*.py"))):
    print(path.read_text() if path.is_file() else "")
"""


def measure(spec: RolloutsSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`, where each result lies as soon as there is one.

    Raises:
        ConfigError: `out` holds another run, or the run's file cannot be used.
        LaunchError, EngineError: a part of the stack does not start, or ends.
    """
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as scratch:
        config, secret_options = without_secrets(config_of(spec, Path(scratch)))
        run = RunDir(Path(config.run.dir) / config.run.name)
        run.create()
        run.write_secret_options(secret_options)
        out = new_directory(out)
        append(out, [header("rollouts", command, spec, PACKAGES)])
        try:
            asyncio.run(_append_all(out, _records(spec, config, run, out)))
        finally:
            shutil.copytree(run.logs, out / "logs")


async def _append_all(out: Path, records: AsyncGenerator[Record]) -> None:
    async with contextlib.aclosing(records):
        async for record in records:
            append(out, [record])


async def _records(spec: RolloutsSpec, config: Config, run: RunDir, out: Path) -> AsyncGenerator[Record]:
    inputs = await check_inputs(config, run, lambda text: logger.info("event=note text=%s", text))
    rows = await asyncio.to_thread(open_task_rows, config, load_tokenizer(inputs.model), run.data)
    if spec.sweep:
        found: list[Round] = []
        async with contextlib.aclosing(swept(spec, config, inputs.model, rows, out)) as records:
            async for record in records:
                found += [record] if isinstance(record, Round) else []
                yield record
        config = config_with(config, changes_of(found))
        yield Fact(BEST, best_of(speeds_of(found)), config.engine.sglang.flags)
    async with started(config, run) as stack, contextlib.aclosing(rounds(spec, config, stack, inputs.model, rows)) as records:
        async for record in records:
            yield record


async def rounds(spec: RolloutsSpec, config: Config, stack: Stack, model_dir: Path, rows: TaskRows | MixedRows) -> AsyncGenerator[Record]:
    """Start the engines, and have the stack make rollouts of each length, and the plain clients ask for as many.

    Args:
        spec: what is asked.
        config: see `config_of`.
        stack: a bus without workers.
        model_dir: the initial model.
        rows: the training rows.
    """
    yield Fact(SLOTS, "all engines", config.engine.slots * config.engine.workers)
    async with stack.working(config, ENGINES):
        await publish_first(config, stack, model_dir)
        engines = await serving(config, stack)
        if config.engine.traits.server:
            addresses = sglang_addresses(os.getpid())
        else:
            addresses = [Address(one.address, stack.run.engine_token(), sglang=False) for one in engines]
        for tokens, count in spec.rounds_of():
            long = with_tokens(config, tokens)
            async with stack.working(long, MAKERS):
                await roll(stack, one_wave(long))
                for number in range(spec.rounds):
                    for record in await _round(spec, long, stack, addresses, rows, tokens, count, number):
                        yield record


def one_wave(config: Config) -> int:
    """Tasks that fill the slots once."""
    return max(1, config.engine.slots * config.engine.workers // config.group_size)


async def _round(
    spec: RolloutsSpec,
    config: Config,
    stack: Stack,
    addresses: Sequence[Address],
    rows: TaskRows | MixedRows,
    tokens: int,
    count: int,
    number: int,
) -> list[Round]:
    tasks = num_tasks(config, count)
    found: list[Round] = []
    for contender in turn((STACK, PLAIN, TOGETHER) if spec.plain else (STACK,), number):
        first, watch = (await stack.bus.state(TASKS)).last, Watch()
        async with watch.open(addresses, stack.names()):
            if contender == STACK:
                values = await roll(stack, tasks)
            else:
                # Other rows than those that the other client asks for: prompts that are cached cost less.
                begin = first + (tasks if contender == TOGETHER else 0)
                values = await stack.until(asked(addresses, planned(rows, config, begin, tasks), config, grouped=contender == TOGETHER))
        found.append(Round(cell=f"{tokens} tokens", contender=contender, round=number, values=values | watch.values))
    return found


def planned(rows: TaskRows | MixedRows, config: Config, first: int, tasks: int) -> list[RolloutTask]:
    """The tasks that a feeder would issue, but for those whose rows cannot be used; raises ConfigError for several sets of rows."""
    if isinstance(rows, MixedRows):
        raise ConfigError("--plain: expected one file of rows, got data.sources", hint="--set data.train=FILE", key="data.sources")
    return [task for task in plan_tasks(Grant(first + tasks, 0, first), first, first + tasks, rows, config) if task.prompt_ids]


async def asked(addresses: Sequence[Address], tasks: Sequence[RolloutTask], config: Config, *, grouped: bool) -> dict[str, float]:
    """Have the servers answer all tasks; the values that `roll` gives."""
    began_s = time.monotonic()
    answers, tokens = await ask(addresses, tasks, tasks_at_once=in_flight(config), grouped=grouped)
    wanted = sum(task.num_rollouts for task in tasks)
    return {"rollouts": answers, "failed": wanted - answers, "tokens": tokens, "seconds": time.monotonic() - began_s}


async def swept(spec: RolloutsSpec, config: Config, model_dir: Path, rows: TaskRows | MixedRows, out: Path) -> AsyncGenerator[Record]:
    """Start a server for each set of flags, and have the plain client ask it for rollouts of each length."""
    known = await asyncio.to_thread(known_flags, config)
    began_s = time.monotonic()
    found: list[Round] = []
    sets = [(name, FLAG_SETS[name].changes) for name in spec.compared]
    while sets:
        name, changes = sets.pop(0)
        if unknown := unknown_flags(changes, known):
            yield Fact(LEFT_OUT, name, f"this SGLang has no {', '.join(unknown)}")
        elif time.monotonic() - began_s > spec.sweep_s * (1.0 if name == COMBINED else _ALONE):
            yield Fact(LEFT_OUT, name, f"no time left of --sweep-s {spec.sweep_s:g}")
        else:
            logger.info("event=flags set=%s", name)
            try:
                measured = await _one_set(spec, config_with(config, changes), model_dir, rows, name, out)
            except EngineError as error:
                measured = []
                yield Fact(LEFT_OUT, name, error.message[:600])
            for record in measured:
                yield record
            found += measured
        if not sets and name != COMBINED and (together := combined(speeds_of(found))):
            sets.append((COMBINED, together))


async def _one_set(spec: RolloutsSpec, config: Config, model_dir: Path, rows: TaskRows | MixedRows, name: str, out: Path) -> list[Round]:
    engine = replace(config.engine, sglang=replace(config.engine.sglang, start_timeout_s=spec.start_s))
    dtype = config.trainer.dtype or config.model.dtype
    log = out / f"server-{name.replace(' ', '-')}.log"
    server = SglangServer(engine, model_dir, name=name, max_len=config.model.max_len, dtype=dtype, log_path=log)
    try:
        await server.start()
        address = [Address(server.client.address, server.key, sglang=True)]
        found: list[Round] = []
        for tokens, count in spec.rounds_of():
            long, watch = with_tokens(config, tokens), Watch()
            if not found:
                await asked(address, planned(rows, long, 0, one_wave(long)), long, grouped=False)
            async with watch.open(address, {}):
                values = await asked(address, planned(rows, long, 0, num_tasks(long, count)), long, grouped=False)
            values |= {**watch.values, "start_s": server.start_s}
            found.append(Round(cell=f"{SWEEP}{tokens} tokens", contender=name, round=0, values=values))
        return found
    finally:
        await server.stop()


def known_flags(config: Config) -> str:
    """The text of SGLang's own arguments, which it has not to be imported for; raises EngineError where it is not installed."""
    python = interpreter(config.engine.sglang)
    try:
        return subprocess.run([python, "-c", _LIST_FLAGS], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise EngineError(
            f"expected SGLang in the environment of {python}, got none", hint="name its interpreter in engine.sglang.python", python=python
        ) from error


def changes_of(found: Sequence[Round]) -> Mapping[str, Any]:
    """The changes of the set that was the fastest."""
    speeds = speeds_of(found)
    best = best_of(speeds)
    return combined(speeds) if best == COMBINED else FLAG_SETS[best].changes
