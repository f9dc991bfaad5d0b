"""The measuring process: every contender generates in turn, round after round.

Run as `python -m benchmarks.engine.measure SPEC.json RAW.json`, with the thread counts in its environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
import transformers

from benchmarks.engine.contenders import (
    GENERATE,
    Contender,
    ContinuousContender,
    GenerateContender,
    LocalContender,
    Made,
    load,
    started,
    teacher_forced,
)
from benchmarks.engine.records import Failure, Raw, Timing
from benchmarks.engine.spec import MODELS, Spec, build_model
from benchmarks.machine import machine
from streamrl.runtime.service import die_with_parent

_MOST_REPEATS = 64


async def measure(spec: Spec, directory: Path) -> Raw:
    """All models, batch sizes and rounds."""
    torch.set_num_threads(spec.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    timings: list[Timing] = []
    failures: list[Failure] = []
    distances: dict[str, float] = {}
    parameters: dict[str, int] = {}
    for name in spec.models:
        model_dir = build_model(name, spec.seed, directory)
        rng = np.random.default_rng(spec.seed)
        most = rng.integers(3, MODELS[name].vocab, (max(spec.batches), spec.prompt_tokens)).tolist()
        model, paged = load(model_dir), load(model_dir)
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        max_len = spec.prompt_tokens + spec.new_tokens
        ours = LocalContender(model_dir, model, slots=len(most), max_len=max_len, threads=spec.threads)
        continuous = ContinuousContender(paged, most=most, new_tokens=spec.new_tokens)
        failed: dict[str, str] = {}
        contenders = await started([lambda ours=ours: ours, lambda m=model: GenerateContender(m), lambda c=continuous: c], failed)
        failures += [Failure(name, contender, reason) for contender, reason in failed.items()]
        try:
            distances[name] = teacher_forced(model, most, await ours.generate(most, spec.new_tokens))
            for batch in spec.batches:
                timings += await _batch(spec, name, contenders, most[:batch])
        finally:
            for contender in contenders:
                await contender.stop()
    return Raw(spec=spec, machine=machine(), parameters=parameters, timings=timings, failures=failures, logprob_distances=distances)


async def _batch(spec: Spec, model: str, contenders: Sequence[Contender], prompts: list[list[int]]) -> list[Timing]:
    """One batch size. Every contender makes the batch once before the clock runs, and then the same number of times in each round."""
    repeats = 1
    for contender in contenders:
        began = time.perf_counter()
        _check(contender, await contender.generate(prompts, spec.new_tokens), prompts, spec)
        if contender.name == GENERATE:
            repeats = max(repeats, math.ceil(spec.min_round_s / (time.perf_counter() - began)))
    repeats = min(repeats, _MOST_REPEATS)
    timings: list[Timing] = []
    for number in range(spec.rounds):
        # Who begins changes from round to round, so that nobody always runs after the same neighbour.
        turn = number % len(contenders)
        for contender in (*contenders[turn:], *contenders[:turn]):
            wall, cpu, made = time.perf_counter(), time.process_time(), 0
            for _ in range(repeats):
                made += sum(map(len, (await contender.generate(prompts, spec.new_tokens)).tokens))
            timings.append(
                Timing(
                    model=model,
                    batch=len(prompts),
                    contender=contender.name,
                    round=number,
                    tokens=made,
                    wall_s=time.perf_counter() - wall,
                    cpu_s=time.process_time() - cpu,
                )
            )
    return timings


def _check(contender: Contender, made: Made, prompts: list[list[int]], spec: Spec) -> None:
    lengths = {len(tokens) for tokens in made.tokens}
    if lengths != {spec.new_tokens} or len(made.tokens) != len(prompts):
        raise RuntimeError(f"{contender.name}: expected {len(prompts)} x {spec.new_tokens} tokens, got {len(made.tokens)} x {lengths}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the specification file says; write the raw file."""
    spec_path, raw_path = map(Path, sys.argv[1:] if argv is None else argv)
    die_with_parent(os.getppid())
    spec = msgspec.json.decode(spec_path.read_bytes(), type=Spec)
    with tempfile.TemporaryDirectory(prefix="streamrl-bench-") as directory, contextlib.redirect_stdout(sys.stderr):
        raw = asyncio.run(measure(spec, Path(directory)))
    raw_path.write_bytes(msgspec.json.encode(raw))
    return 0


if __name__ == "__main__":
    sys.exit(main())
