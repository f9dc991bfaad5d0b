"""`bench engine` and `bench loop`: flags and what they start."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from streamrl.errors import ConfigError

T = TypeVar("T")


def add_engine(kinds: Any) -> None:
    """Add `engine` to the kinds of benchmark."""
    engine = kinds.add_parser("engine", help="tokens/s of the local engine beside transformers' generate and continuous batching")
    engine.add_argument("--models", default="quickstart,30M", help="quickstart, 30M or both (default)")
    engine.add_argument("--batches", default="1,8,32,64", help="requests at once (default 1,8,32,64)")
    engine.add_argument("--prompt", type=int, default=30, metavar="TOKENS", help="tokens of a prompt (default 12)")
    engine.add_argument("--tokens", type=int, default=48, help="new tokens of each request (default 48)")
    engine.add_argument("--rounds", type=int, default=7, help="rounds over all contenders (default 7)")
    engine.add_argument("--round-s", type=float, default=0.5, help="least seconds of transformers' generate in a round (default 0.5)")
    engine.add_argument("--threads", type=int, default=1, help="CPU threads of a forward pass (default 1)")
    engine.add_argument("--out", metavar="DIR", default="bench-engine", help="new directory for the files (default bench-engine)")
    _add_report(engine)
    engine.add_argument("--json", action="store_true", help="print the report as JSON")
    engine.set_defaults(run_bench=run_engine)


def run_engine(arguments: argparse.Namespace) -> int:
    """Measure, write and print the report. A target that was missed is a measurement, not a failure."""
    from benchmarks.engine.report import render
    from benchmarks.engine.run import report_of, run
    from benchmarks.engine.spec import Spec

    if arguments.report:
        return _show(arguments, report_of(Path(arguments.report)), render, "engine")
    spec = Spec(
        models=tuple(arguments.models.split(",")),
        batches=integers("--batches", arguments.batches),
        prompt_tokens=arguments.prompt,
        new_tokens=arguments.tokens,
        rounds=arguments.rounds,
        min_round_s=arguments.round_s,
        threads=arguments.threads,
    )
    return _show(arguments, run(spec, Path(arguments.out)), render, "engine")


def add_loop(kinds: Any) -> None:
    """Add `loop` to the kinds of benchmark."""
    loop = kinds.add_parser("loop", help="the quickstart's loop with and without the bus; asynchronous against lockstep with a heavy tail")
    loop.add_argument("--ways", default="stream,queues,pipes,memory", help="stream, queues, pipes, memory (default: all)")
    loop.add_argument("--batches", type=int, default=120, help="trained in each run (default 120)")
    loop.add_argument("--skip", type=int, default=30, help="the first of them, which are not measured (default 30)")
    loop.add_argument("--rounds", type=int, default=5, help="rounds over all ways (default 5)")
    loop.add_argument("--tail-rounds", type=int, default=3, help="rounds of asynchronous and lockstep; 0: none (default 3)")
    loop.add_argument("--tail-batches", type=int, default=30, help="trained in each of their runs (default 30)")
    loop.add_argument("--tail-token-ms", type=float, default=20.0, help="mean time of a token there (default 20)")
    loop.add_argument("--backend", default="torch", choices=("torch", "table"), help="table: without torch, to try it out")
    loop.add_argument("--out", metavar="DIR", default="bench-loop", help="new directory for the files (default bench-loop)")
    _add_report(loop)
    loop.add_argument("--json", action="store_true", help="print the report as JSON")
    loop.set_defaults(run_bench=run_loop)


def run_loop(arguments: argparse.Namespace) -> int:
    """Measure, write and print the report. A target that was missed is a measurement, not a failure."""
    from benchmarks.loop.report import render
    from benchmarks.loop.run import report_of, run
    from benchmarks.loop.ways import LoopSpec, parse_ways

    if arguments.report:
        return _show(arguments, report_of(Path(arguments.report)), render, "loop")
    spec = LoopSpec(
        ways=parse_ways(arguments.ways),
        batches=arguments.batches,
        skip=arguments.skip,
        rounds=arguments.rounds,
        backend=arguments.backend,
        tail_rounds=arguments.tail_rounds,
        tail_batches=arguments.tail_batches,
        tail_delay_s=arguments.tail_token_ms / 1e3,
    )
    return _show(arguments, run(spec, Path(arguments.out)), render, "loop")


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--report", metavar="DIR", help="measure nothing: make the report again from a directory's raw file")
    parser.add_argument("--docs", metavar="FILE", help="put the tables between the marks in a document")


def _show(arguments: argparse.Namespace, report: T, render: Callable[[T], str], name: str) -> int:
    """Print a report, and put it into the document that `--docs` names."""
    import msgspec

    from benchmarks.output import marks, write_between

    if arguments.docs:
        write_between(Path(arguments.docs), marks(name), render(report))
    print(msgspec.json.encode(report).decode() if arguments.json else render(report))
    return 0


def integers(flag: str, text: str) -> tuple[int, ...]:
    """Numbers separated by commas; raises ConfigError that names the flag."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{flag}: expected whole numbers separated by commas, got {text!r}") from error
