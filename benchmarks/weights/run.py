"""`streamrl bench weights`: one server, one load, and windows of updates between windows of none."""

from __future__ import annotations

import asyncio
import logging
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.raw import Header, append, header, new_directory
from benchmarks.report import Check
from benchmarks.shapes import num_elements, parameters, write_model
from benchmarks.weights.checks import check_updates
from benchmarks.weights.engine import BenchEngine
from benchmarks.weights.flags import server_flags, static_share
from benchmarks.weights.load import LoadProcess, LoadSpec
from benchmarks.weights.options import LARGE, OURS, Mode, Options, Window, resolve
from benchmarks.weights.records import RunRecord, UpdateRecord, WindowRecord
from benchmarks.weights.stock import StockEngine
from benchmarks.weights.trainer import SyntheticTrainer
from benchmarks.weights.updates import Updates
from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.errors import EngineError

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "transformers", "safetensors", "numpy")
PROMPT_TOKENS = 64
_SETTLE_S = 0.3
"""Between windows: the recorded events are fetched then, which must not be seen in one."""
_SPREAD_S = 0.3
_SHM = Path("/dev/shm")


def measure(options: Options, out: Path, command: str) -> None:
    """Measure into the new directory `out`. What was measured until an error or SIGTERM is there too.

    Raises:
        ConfigError: the options cannot be had on this machine, or `out` holds another run.
        EngineError: the server did not start, has died, or the benchmark was told to end.
        LaunchError: the load process has died.
    """
    options = resolve(options, num_gpus=torch.cuda.device_count())
    out = new_directory(out.absolute())
    place = _SHM if _SHM.is_dir() else None
    prefix = "streamrl-bench-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=place) as scratch, tempfile.TemporaryDirectory(prefix=prefix) as disk:
        bench = WeightBench(options, header("weights", command, options, PACKAGES), out, Path(scratch), Path(disk))
        try:
            asyncio.run(_until_told(bench))
        except asyncio.CancelledError as error:
            raise EngineError("the benchmark was told to end before its last window", hint=f"see {out} for what it has measured") from error


def engine_config(options: Options) -> EngineConfig:
    """The engine's configuration, as a run's TOML would give it."""
    share = None
    if torch.cuda.is_available():
        share = static_share(
            options.model,
            torch.cuda.get_device_properties(0).total_memory,
            tensor_parallel=options.tensor_parallel,
            streams=options.streams,
            tokens=PROMPT_TOKENS + options.mean_tokens,
            beside=_beside(options),
        )
    flags = server_flags(options.model, streams=options.streams, default_graphs=options.default_graphs, share=share)
    sglang = SglangConfig(
        python=options.python,
        tensor_parallel=options.tensor_parallel,
        swap="flip",
        max_gap_ms=options.max_gap_ms,
        flags={**flags, **options.flags},
        record_forwards=True,
    )
    return EngineConfig(kind="sglang", slots=options.streams, sglang=sglang)


async def _until_told(bench: WeightBench) -> None:
    """Run it; SIGTERM ends it in good order."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await bench.measure()


class WeightBench:
    """One run and what it has seen so far.

    Args:
        options: resolved.
        header: of the raw file.
        out: for the raw file and the server's log.
        scratch: for the model and versions; in memory where the system has such a place.
        disk: for checkpoints.
    """

    def __init__(self, options: Options, header: Header, out: Path, scratch: Path, disk: Path) -> None:
        self._options = options
        self._header = header
        self._out = out
        self._scratch = scratch
        self._disk = disk
        self._windows: list[WindowRecord] = []
        self._updates: list[UpdateRecord] = []
        self._checks: list[Check] = []
        self._memory = [_memory("before the server starts")]

    async def measure(self) -> None:
        """Start the server, check, load, and write the raw file whatever happens once the load runs."""
        options = self._options
        model_dir = self._scratch / "model"
        write_model(options.model, model_dir)
        async with BenchEngine.started(
            engine_config(options),
            model_dir,
            max_len=_max_len(options),
            dtype=options.model.dtype,
            max_gap_ms=options.max_gap_ms,
            log_path=self._out / "server.log",
        ) as engine:
            self._memory.append(_memory("server started"))
            updates = self._prepare(engine, model_dir)
            self._memory.append(_memory("trainer's weights made"))
            modes = {window.mode for window in options.windows}
            async with updates.connected(modes):
                self._checks, self._updates = await check_updates(engine, updates, distributed=Mode.DISTRIBUTED in modes)
                self._memory.append(_memory("first versions served"))
                try:
                    await self._load(engine, updates)
                finally:
                    append(self._out, [self._header, self._facts(engine), *self._updates, *engine.forwards])

    def _prepare(self, engine: BenchEngine, model_dir: Path) -> Updates:
        options = self._options
        devices = [torch.device(name) for name in options.trainer_device.split(",")]
        return Updates(
            SyntheticTrainer(options.model, devices, self._scratch / "weights", slots=_slots(options)),
            engine,
            StockEngine(engine.client, sglang=engine.sglang, tensor_parallel=options.tensor_parallel),
            model_dir=model_dir,
            scratch=self._disk,
            spread_s=_SPREAD_S if engine.device in devices and engine.device.type == "cuda" else 0.0,
        )

    async def _load(self, engine: BenchEngine, updates: Updates) -> None:
        """All windows under load."""
        options = self._options
        spec = LoadSpec(
            address=engine.client.address,
            key=engine.key,
            streams=options.streams,
            probes=options.probes,
            mean_tokens=options.mean_tokens,
            prompt_tokens=PROMPT_TOKENS if options.mean_tokens > PROMPT_TOKENS else 8,
            vocab=options.model.vocab,
            out=str(self._out),
        )
        async with LoadProcess(spec) as load:
            await asyncio.sleep(options.warm_s)
            for index, window in enumerate(options.windows):
                load.check()
                await engine.fetch_forwards()
                await asyncio.sleep(_SETTLE_S)
                record, made = await _window(index, window, updates)
                self._windows.append(record)
                self._updates += await _completed(window, made, engine, updates)
                failed = sum(bool(update.error) for update in made)
                logger.info("event=window index=%d title=%s updates=%d failed=%d", index, window.title, len(made), failed)
                engine.check()
            await engine.fetch_forwards()
            self._memory.append(_memory("after the last window"))

    def _facts(self, engine: BenchEngine) -> RunRecord:
        options = self._options
        shape = options.model
        names = parameters(shape)
        item = torch.empty(0, dtype=getattr(torch, shape.dtype)).element_size()
        cuda = torch.cuda.is_available()
        return RunRecord(
            nbytes=sum(torch.Size(size).numel() for _, size in names) * item,
            num_tensors=len(names),
            device=torch.cuda.get_device_name(0) if cuda else "CPU",
            num_devices=torch.cuda.device_count() if cuda else 1,
            transport="shm" if options.trainer_device == "cpu" else "ipc",
            sglang=engine.sglang,
            start_server_s=engine.start_s,
            hello=[msgspec.to_builtins(rank) for rank in engine.ranks],
            windows=self._windows,
            checks=self._checks,
            gpu_memory=self._memory,
        )


async def _window(index: int, window: Window, updates: Updates) -> tuple[WindowRecord, list[UpdateRecord]]:
    start_s = time.monotonic()
    made: list[UpdateRecord] = []
    if window.mode is Mode.STEADY:
        await asyncio.sleep(window.seconds)
    else:
        for number in range(max(1, int(window.seconds / window.every_s))):
            await asyncio.sleep(start_s + number * window.every_s - time.monotonic())
            made.append(await updates.apply(window.mode, index))
        await asyncio.sleep(start_s + window.seconds - time.monotonic())
    record = WindowRecord(mode=window.mode, title=window.title, every_s=window.every_s, start_s=start_s, end_s=time.monotonic())
    return record, made


async def _completed(window: Window, made: list[UpdateRecord], engine: BenchEngine, updates: Updates) -> list[UpdateRecord]:
    """The window's records with what is only known afterwards; digesting all that is served would disturb the window itself."""
    if window.mode not in OURS or not made or made[-1].error:
        return made
    *others, last = await engine.with_device_times(made)
    return [*others, await updates.digested(last)]


def _max_len(options: Options) -> int:
    """Longest sequence of the load, and room for the checks."""
    return min(options.model.max_positions - 64, PROMPT_TOKENS + 2 * options.mean_tokens + 512)


def _slots(options: Options) -> int:
    """Snapshots the trainer's device holds: two, so that one is written while the other is read, or one where two would not fit."""
    return 1 if num_elements(options.model) > LARGE else 2


def _beside(options: Options) -> int:
    """Bytes of the trainer's weights and snapshots on a GPU of the engine."""
    devices = options.trainer_device.split(",")
    if not {f"cuda:{gpu}" for gpu in range(options.tensor_parallel)} & set(devices):
        return 0
    return (1 + _slots(options)) * options.model.item_bytes * num_elements(options.model) // len(devices)


def _memory(moment: str) -> dict[str, Any]:
    """Used bytes of every GPU, by all processes."""
    used: dict[str, Any] = {"moment": moment}
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        used[f"cuda:{index}"] = total - free
    return used
