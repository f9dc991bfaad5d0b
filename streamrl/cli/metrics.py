"""`metrics`: the numbers of a run over time."""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamrl.monitor.metrics_read import Metrics, Newest
    from streamrl.runtime.rundir import RunDir


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    metrics = verbs.add_parser("metrics", help="print, follow or export the metrics of a run")
    metrics.add_argument("run", metavar="RUN", help="name or directory of the run")
    metrics.add_argument("--name", default="*", metavar="GLOB", help="these metrics only, for example 'lag/*'")
    metrics.add_argument("-f", "--follow", action="store_true", help="print rows as they come, until the run is down or Ctrl-C")
    metrics.add_argument("--json", action="store_true", help="print JSON; with --follow an object a line")
    metrics.add_argument("--export", metavar="FILE", help="write all rows to FILE, which ends with .csv, .parquet or .jsonl")
    metrics.add_argument("--dir", default="runs", help="directory that holds the runs")
    metrics.set_defaults(run_verb=run_metrics)


def run_metrics(arguments: argparse.Namespace) -> int:
    """Print the newest values, or rows as they come, or write them all to a file."""
    from pathlib import Path

    from streamrl.monitor.metrics_export import export
    from streamrl.monitor.metrics_read import Metrics
    from streamrl.runtime.rundir import RunDir

    if arguments.export is not None and (arguments.follow or arguments.json):
        raise ConfigError("expected --export, or --follow or --json, got both", hint="--export writes what there is now")
    run = RunDir.find(arguments.run, base=arguments.dir)
    metrics = Metrics(run, arguments.name)
    if arguments.export is not None:
        print(f"{export(metrics, Path(arguments.export))} rows written to {arguments.export}")
    elif arguments.follow:
        _follow(run, metrics, as_json=arguments.json)
    else:
        _print_newest(metrics.newest(), as_json=arguments.json)
    if metrics.num_torn:
        print(f"{metrics.num_torn} lines that are no rows were passed over", file=sys.stderr)
    return 0


def _follow(run: RunDir, metrics: Metrics, *, as_json: bool) -> None:
    from streamrl.monitor.metrics_file import encoded
    from streamrl.runtime.lock import holder

    for row in metrics.follow(lambda: holder(run) is None):
        if as_json:
            print(encoded(row).decode(), end="", flush=True)
            continue
        who = row.of or row.kind
        values = " ".join(f"{name}={value:.6g}" for name, value in row.values.items())
        print(f"[{time.strftime('%H:%M:%S', time.localtime(row.time_s))}] {who} version={row.version or '-'} {values}", flush=True)


def _print_newest(newest: Mapping[str, Newest], *, as_json: bool) -> None:
    import msgspec

    from streamrl.telemetry.names import Reduction, metric

    if as_json:
        print(msgspec.json.format(msgspec.json.encode(newest), indent=2).decode())
        return
    if not newest:
        print("no values of these metrics yet")
        return
    longest = max(map(len, newest))
    area = ""
    for name, one in newest.items():
        if area and not name.startswith(f"{area}/"):
            print()
        area = name.partition("/")[0]
        value = "-" if one.value is None else f"{one.value:.5g}"
        workers = ", ".join(f"{of} {value:.5g}" for of, value in sorted(one.of.items()))
        print(f"{name:<{longest}}  {value:>11}  {one.unit:<11}  {workers}".rstrip())
    last = max(newest.values(), key=lambda one: one.time_s)
    if any(metric(name).reduction is Reduction.SUM for name in newest):
        print("amounts (`..._total`) are those of the newest batch or window; rollouts/dropped_so_far is the run's")
    print(f"as of {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(last.time_s))}, version {last.version or '-'}")
