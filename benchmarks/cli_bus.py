"""`bench bus`: samples through publish, read and decode, beside what others use."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from streamrl.errors import ConfigError


def add_bus(kinds: Any) -> None:
    """Add `bus` to the kinds of benchmark."""
    bus = kinds.add_parser("bus", help="samples/s and tokens/s of the sample stream beside Redis streams, ZMQ and Ray's object store")
    bus.add_argument("--samples", default="1,8,64", help="samples of a message (default 1,8,64)")
    bus.add_argument("--tokens", default="256,2k,16k", help="tokens of a sample (default 256,2k,16k)")
    bus.add_argument(
        "--transports", default="", help="streamrl, redis-orjson, redis-pickle, zmq-msgpack, ray (default: all that are there)"
    )
    bus.add_argument("--rounds", type=int, default=5, help="rounds over all transports (default 5)")
    bus.add_argument("--round-tokens", type=int, default=16 << 20, help="tokens of each shape in a round (default 16777216)")
    bus.add_argument("--out", metavar="DIR", default="bench-bus", help="new directory for the files (default bench-bus)")
    bus.add_argument("--report", metavar="DIR", help="measure nothing: make table and picture again from the raw file of a run")
    bus.add_argument("--docs", metavar="FILE", help="with --report: put the tables between the marks in a document")
    bus.add_argument("--json", action="store_true", help="print the report as JSON")
    bus.set_defaults(run_bench=run_bus)


def run_bus(arguments: argparse.Namespace) -> int:
    """Measure (or read a raw file), write and print the report. A target that was missed is a measurement, not a failure."""
    import msgspec

    from benchmarks.bus.outcome import measure_into, report_from, write_docs
    from benchmarks.bus.plan import BusOptions, parse_numbers, parse_transports
    from benchmarks.bus.report import render

    if arguments.docs and not arguments.report:
        raise ConfigError("--docs: expected it together with --report")
    if arguments.report:
        report = report_from(Path(arguments.report))
    else:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
        report = measure_into(
            BusOptions(
                out=arguments.out,
                samples=parse_numbers("--samples", arguments.samples),
                tokens=parse_numbers("--tokens", arguments.tokens),
                transports=parse_transports(arguments.transports),
                rounds=arguments.rounds,
                round_tokens=arguments.round_tokens,
            )
        )
    if arguments.docs:
        write_docs(Path(arguments.docs), report)
    print(msgspec.json.encode(report).decode() if arguments.json else render(report))
    return 0
