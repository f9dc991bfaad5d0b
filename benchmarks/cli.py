"""`streamrl bench WHAT ...`: flags and what they start. `weights` is here; see also `benchmarks.cli_bus` and `cli_speed`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cli_bus, cli_speed
from streamrl.config.engines import SglangConfig
from streamrl.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Run one benchmark and return its exit code; raises StreamRLError."""
    given = parser().parse_args(arguments)
    code: int = given.run_bench(given)
    return code


def parser() -> argparse.ArgumentParser:
    """The whole command line after `streamrl bench`."""
    bench = argparse.ArgumentParser(prog="streamrl bench", description="Measure the product on this machine.")
    kinds = bench.add_subparsers(title="what to measure", metavar="WHAT", required=True)
    weights = kinds.add_parser("weights", help="new weights for a decoding SGLang: ours and SGLang's own ways, beside steady decoding")
    weights.add_argument("--report", metavar="DIR", nargs="+", help="measure nothing: make tables and pictures again from raw files")
    weights.add_argument("--docs", metavar="FILE", help="with --report: put one table of all runs between the marks in a document")
    weights.add_argument("--out", metavar="DIR", help="new directory for raw files, table and picture (default bench-SHAPE)")
    weights.add_argument(
        "--shape", default="tiny", help="model: tiny or tiny-moe (CPU), 0.6B, 4B, 8B or 30B-A3B; random weights (default tiny)"
    )
    weights.add_argument("--plan", default="", help="full, short, smoke, or windows like steady:5,paced:10/1,steady:5")
    weights.add_argument("--streams", type=int, default=0, help="requests decoding at once (default 128; on a CPU 8)")
    weights.add_argument("--probes", type=int, default=0, help="how many of them stream, for the gaps a client sees (default 4)")
    weights.add_argument("--tokens", type=int, default=0, help="tokens a request makes on average (default 1500; on a CPU 64)")
    weights.add_argument("--tp", type=int, default=0, help="GPUs of the engine (default: as the shape needs)")
    weights.add_argument(
        "--trainer-device", default="", help="where the trainer's weights are (default: a GPU that the engine leaves free)"
    )
    gap_ms = SglangConfig().max_gap_ms
    weights.add_argument(
        "--max-gap-ms",
        type=float,
        default=gap_ms,
        help=f"bound of the paced windows on copying beside a pass (default {gap_ms:g}, a run's; 0: none)",
    )
    weights.add_argument("--warm-s", type=float, default=0.0, help="seconds of load before the first window (default 15; on a CPU 1)")
    weights.add_argument("--default-graphs", action="store_true", help="capture graphs at SGLang's default sizes (slow start)")
    weights.add_argument("--python", default="", help="interpreter of SGLang's environment (default: this one)")
    weights.add_argument("--flag", action="append", default=[], metavar="NAME=VALUE", help="any flag of SGLang; JSON or text")
    weights.add_argument("--json", action="store_true", help="print the report as JSON")
    weights.set_defaults(run_bench=run_bench_weights)
    cli_bus.add_bus(kinds)
    cli_speed.add_engine(kinds)
    cli_speed.add_loop(kinds)
    return bench


def run_bench_weights(arguments: argparse.Namespace) -> int:
    """Measure (or read raw files), write and print the report; 1 if a check of correctness failed."""
    from benchmarks.weights.outcome import report_from

    if arguments.report:
        document = Path(arguments.docs) if arguments.docs else None
        return report_from([Path(directory) for directory in arguments.report], as_json=arguments.json, document=document)
    if arguments.docs:
        raise ConfigError("--docs: expected it together with --report")
    from benchmarks.weights.options import Options
    from benchmarks.weights.run import run

    options = Options(
        shape=arguments.shape,
        plan=arguments.plan,
        out=arguments.out or f"bench-{arguments.shape}",
        streams=arguments.streams,
        probes=arguments.probes,
        mean_tokens=arguments.tokens,
        tensor_parallel=arguments.tp,
        trainer_device=arguments.trainer_device,
        max_gap_ms=arguments.max_gap_ms,
        warm_s=arguments.warm_s,
        default_graphs=arguments.default_graphs,
        python=arguments.python,
        flags=dict(_flag(text) for text in arguments.flag),
    )
    return report_from([run(options)], as_json=arguments.json)


def _flag(text: str) -> tuple[str, Any]:
    import json

    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--flag: expected NAME=VALUE, got {text!r}", hint="for example --flag mem_fraction_static=0.5")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
