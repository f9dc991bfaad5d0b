"""`bench engine`: every contender generates in turn, round after round, in a process of its own.

Run as `python -m benchmarks.engine.measure SPEC OUT COMMAND`, with the thread counts in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.engine.spec import GENERATE, MODELS, Spec, build_model
from benchmarks.processes import child
from benchmarks.raw import Fact, Record, Round, append, header, new_directory
from benchmarks.report import turn
from streamrl.config.tree import Config, EngineConfig
from streamrl.errors import LaunchError
from streamrl.runtime.kinds import environment
from streamrl.runtime.service import die_with_parent

if TYPE_CHECKING:
    from benchmarks.engine.contenders import Contender, Made

_MOST_REPEATS = 64


def measure(spec: Spec, out: Path, command: str) -> None:
    """Measure into the new directory `out`, in a process of its own.

    Thread counts, those of an engine worker, must be in its environment before torch is loaded.

    Raises:
        ConfigError: `out` holds another run.
        LaunchError: the measuring process failed.
    """
    out = new_directory(out)
    threads = environment(Config(engine=EngineConfig(threads=spec.threads)), "engine")
    process = child("benchmarks.engine.measure", msgspec.json.encode(spec).decode(), out, command, env=threads)
    if code := subprocess.run(**process, check=False).returncode:
        raise LaunchError(f"the measuring process: expected exit code 0, got {code}", hint="its error stands above")


async def records(spec: Spec, directory: Path) -> AsyncIterator[Record]:
    """All models, batch sizes and rounds; models are written to `directory`."""
    import torch
    import transformers

    from benchmarks.engine import contenders as ways

    torch.set_num_threads(spec.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    for name in spec.models:
        model_dir = build_model(name, spec.seed, directory)
        rng = np.random.default_rng(spec.seed)
        most = rng.integers(3, MODELS[name].vocab, (max(spec.batches), spec.prompt_tokens)).tolist()
        model, paged = ways.load(model_dir), ways.load(model_dir)
        yield Fact("parameters", name, sum(parameter.numel() for parameter in model.parameters()))
        max_len = spec.prompt_tokens + spec.new_tokens
        ours = ways.LocalContender(model_dir, model, slots=len(most), max_len=max_len, threads=spec.threads)
        continuous = ways.ContinuousContender(paged, most=most, new_tokens=spec.new_tokens)
        failed: dict[str, str] = {}
        contenders = await ways.started([ours, ways.GenerateContender(model), continuous], failed)
        for contender, reason in failed.items():
            yield Fact("left out", f"{contender} ({name})", reason)
        try:
            yield Fact("log-prob distance", name, ways.teacher_forced(model, most, await ours.generate(most, spec.new_tokens)))
            for batch in spec.batches:
                async for one in _batch(spec, f"{name}, {batch}", contenders, most[:batch]):
                    yield one
        finally:
            for contender in contenders:
                await contender.stop()


async def _batch(spec: Spec, cell: str, contenders: Sequence[Contender], prompts: list[list[int]]) -> AsyncIterator[Round]:
    """One batch size. Every contender makes the batch once before the clock runs, and then the same number of times in each round."""
    repeats = 1
    for contender in contenders:
        began = time.perf_counter()
        _check(contender, await contender.generate(prompts, spec.new_tokens), prompts, spec)
        if contender.name == GENERATE:
            repeats = max(repeats, math.ceil(spec.min_round_s / (time.perf_counter() - began)))
    repeats = min(repeats, _MOST_REPEATS)
    for number in range(spec.rounds):
        for contender in turn(contenders, number):
            wall, cpu, made = time.perf_counter(), time.process_time(), 0
            for _ in range(repeats):
                made += sum(map(len, (await contender.generate(prompts, spec.new_tokens)).tokens))
            # CPU time is the whole process's: nothing but the contender runs in it.
            values = {"tokens": made, "wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
            yield Round(cell=cell, contender=contender.name, round=number, values=values)


def _check(contender: Contender, made: Made, prompts: list[list[int]], spec: Spec) -> None:
    lengths = {len(tokens) for tokens in made.tokens}
    if lengths != {spec.new_tokens} or len(made.tokens) != len(prompts):
        raise RuntimeError(f"{contender.name}: expected {len(prompts)} x {spec.new_tokens} tokens, got {len(made.tokens)} x {lengths}")


async def _measure(spec: Spec, out: Path, command: str, directory: Path) -> None:
    before: list[msgspec.Struct] = [header("engine", command, spec, ("torch", "transformers"))]
    async for record in records(spec, directory):
        append(out, [*before, record])
        before = []


def main() -> None:
    """The measuring process."""
    spec, out, command = sys.argv[1:]
    die_with_parent(os.getppid())
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory, contextlib.redirect_stdout(sys.stderr):
        asyncio.run(_measure(msgspec.json.decode(spec, type=Spec), Path(out), command, Path(directory)))


if __name__ == "__main__":
    main()
