"""The engine in this process, asked for the same samples by nobody but a loop, and by an evaluation."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.evaluation.spec import ALONE, EVALUATION, EvaluationSpec, config_of
from benchmarks.raw import Record, Round, header, write_measured
from streamrl.config.evaluation_sets import ProblemSet, problem_sets
from streamrl.config.tree import Config
from streamrl.core.seeds import rollout_seed
from streamrl.data.model import ensure_model
from streamrl.data.problems import Problems, load_set
from streamrl.data.tokenizer import load_tokenizer
from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import GenerateRequest, HostedEngine
from streamrl.history.evaluate import Subject, serve_weights
from streamrl.producers.evaluation.asking import AHEAD, Room, evaluate
from streamrl.producers.evaluation.store import open_store
from streamrl.producers.factory import runner_of
from streamrl.schemas.versions import Version

PACKAGES = ("numpy", "torch")


def measure(spec: EvaluationSpec, out: Path, command: str) -> None:
    """Measure into the new directory `out`; raises ConfigError when it holds another run."""
    write_measured(out, header("eval", command, spec, PACKAGES), lambda scratch: _records(spec, scratch))


def _records(spec: EvaluationSpec, directory: Path) -> Iterator[Record]:
    rows = ({"prompt": f"{row % 89}+{row % 97}=", "label": str(row % 89 + row % 97)} for row in range(spec.problems))
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield from asyncio.run(_measure(spec, config_of(spec, directory), directory))


async def _measure(spec: EvaluationSpec, config: Config, directory: Path) -> list[Record]:
    model_dir = ensure_model(config, directory / "model")
    [one] = problem_sets(config)
    rows = load_set(one, load_tokenizer(model_dir))
    delay = TokenDelay(mean_s=spec.token_ms / 1e3, sigma=0.0) if spec.token_ms and config.engine.traits.tabular else None
    engine = make_engine(
        config.engine,
        model_dir,
        engine_id="bench",
        max_len=config.model.max_len,
        dtype=config.model.dtype,
        delay=delay,
        log_path=directory / "engine.log",
    )
    subject = Subject(name="bench", model_dir=model_dir, version=Version(0, 0), weights="bench", out=directory)
    found: list[Record] = []
    await engine.start()
    try:
        await serve_weights(engine, config, subject)
        for number in range(spec.rounds):
            ways: dict[str, Callable[[], Awaitable[int]]] = {
                ALONE: lambda: _alone(engine, one, rows, config),
                EVALUATION: lambda number=number: _evaluated(engine, one, rows, subject, number),
            }
            for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
                began_s, cpu_s, load = time.monotonic(), time.process_time(), os.getloadavg()[0]
                tokens = await ways[name]()
                values = {"seconds": time.monotonic() - began_s, "cpu_s": time.process_time() - cpu_s, "tokens": tokens, "load": load}
                found.append(Round(cell="", contender=name, round=number, values=values))
    finally:
        await engine.stop()
    return found


async def _alone(engine: HostedEngine, one: ProblemSet, rows: Problems, config: Config) -> int:
    """The same samples, as many at once, and nothing done with them."""
    room, tokens = Room(lambda: AHEAD * config.engine.slots), 0

    async def ask(row: int) -> None:
        nonlocal tokens
        seeds = tuple(rollout_seed(row, rollout) for rollout in range(one.n))
        request = GenerateRequest(request_id=f"alone-{row}", prompt_ids=rows[row].prompt_ids, sampling=one.sampling, seeds=seeds)
        async for chunk in engine.generate(request):
            tokens += len(chunk.token_ids)
        room.give(one.n)

    async with asyncio.TaskGroup() as group:
        for row in range(len(rows)):
            await room.take(one.n)
            group.create_task(ask(row))
    return tokens


async def _evaluated(engine: HostedEngine, one: ProblemSet, rows: Problems, subject: Subject, number: int) -> int:
    runner = runner_of(one.config, subject.model_dir, engine, "single_turn", key="producer.function")
    with open_store(subject.out / f"round-{number}.jsonl", "bench") as store:
        detail = await evaluate(one, rows, runner, store, version=Version(0, 0), room=Room(lambda: AHEAD * one.config.engine.slots))
    assert detail["failed"] == 0 and np.isfinite(detail["accuracy"])
    return round(detail["tokens"]["sum"])
