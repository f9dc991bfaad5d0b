"""`record`, `replay`, `compare` and `tap`: what is done with the log of a run."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.numbers import not_negative
from streamrl.cli.workers import stoppable
from streamrl.config.code import check_trust, loss_code
from streamrl.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from streamrl.history.source import Source
    from streamrl.runtime.worker import Worker


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    record = verbs.add_parser("record", help="write a run's log as files that a replay, pandas and DuckDB read")
    record.add_argument("run", metavar="RUN", help="name or directory of the run, up or not")
    record.add_argument("--out", required=True, type=Path, metavar="DIR", help="new directory")
    record.add_argument("--checkpoints", action="store_true", help="copy the trainer's checkpoints too")
    _common(record)
    record.set_defaults(run_verb=run_record)

    replay = verbs.add_parser("replay", help="train a run's log again: compare, branch, or back-test")
    replay.add_argument("run", metavar="RUN|DIR", help="name or directory of the run, or a recording of one")
    replay.add_argument("--verify", action="store_true", help="fail unless every version comes out as in the ledger")
    replay.add_argument("--from", dest="first", metavar="V", help="begin at the nearest checkpoint at or below this version")
    replay.add_argument("--to", dest="last", metavar="V", help="end with this version")
    replay.add_argument(
        "--tolerance", type=not_negative, help="deviation of metrics that passes where the numerics fingerprint is another one"
    )
    _trust(replay)
    _overrides(replay, "train a branch of the run with this value; may be repeated")
    replay.add_argument("--name", help="name of the branch")
    replay.add_argument("--policy-only", action="store_true", help="back-test bounds and policies (--set tasks.max_staleness=1,2,4)")
    _common(replay)
    replay.set_defaults(run_verb=run_replay)

    compare = verbs.add_parser("compare", help="put two runs, branches, taps (RUN:NAME) or recordings side by side")
    compare.add_argument("a", metavar="RUN_A")
    compare.add_argument("b", metavar="RUN_B")
    compare.add_argument("--out", type=Path, metavar="PNG", help="draw both")
    _common(compare)
    compare.set_defaults(run_verb=run_compare)

    tap = verbs.add_parser("tap", help="train beside a run that is up, without touching it; Ctrl-C leaves, the same command goes on")
    tap.add_argument("run", metavar="RUN", help="name or directory of the run")
    tap.add_argument("--name", required=True, help="name of the tap: its ledger, checkpoints and position")
    tap.add_argument(
        "--from", dest="first", default="0", metavar="V", help="begin at the run's nearest checkpoint at or below this version"
    )
    _trust(tap)
    tap.add_argument("--lease", dest="lease_s", type=int, default=60, metavar="SECONDS", help="how long its position outlives it")
    _overrides(tap, "train with this value; may be repeated")
    tap.add_argument("--dir", default="runs", help="directory that holds the runs")
    tap.set_defaults(run_verb=stoppable(run_tap))


def run_record(arguments: argparse.Namespace) -> int:
    """Record a run."""
    import msgspec

    from streamrl.history.record import record_run
    from streamrl.runtime.rundir import RunDir

    run = RunDir.find(arguments.run, base=arguments.dir)
    found = asyncio.run(record_run(run, arguments.out, checkpoints=arguments.checkpoints))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        print(f"recorded {found.samples} samples and {found.entries} versions of {found.run} into {arguments.out}")
    return 0


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a run: compare with its ledger, or branch, or back-test."""
    _check_flags(arguments)
    if arguments.policy_only:
        return asyncio.run(_backtest(arguments))
    return asyncio.run(_branch(arguments) if arguments.overrides else _replay(arguments))


def _check_flags(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for flags that another one leaves without a meaning."""
    given = {
        "--verify": arguments.verify,
        "--from": arguments.first is not None,
        "--to": arguments.last is not None,
        "--tolerance": arguments.tolerance is not None,
        "--name": arguments.name is not None,
    }
    if arguments.policy_only:
        what, apart = "--policy-only back-tests the whole run", set(given)
    elif arguments.overrides:
        what, apart = "--set trains something else than the run's own ledger has", {"--verify", "--tolerance"}
    else:
        what, apart = "without --set nothing is branched", {"--name"}
    if wrong := [flag for flag in given if given[flag] and flag in apart]:
        raise ConfigError(f"{what}, and takes no {' or '.join(wrong)}", hint=f"leave out {' and '.join(wrong)}")


def run_compare(arguments: argparse.Namespace) -> int:
    """Print two ledgers side by side, and draw them."""
    import msgspec

    from streamrl.history.compare import compare_runs, print_comparison, write_comparison

    report = asyncio.run(compare_runs(arguments.a, arguments.b, base=arguments.dir))
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        print_comparison(report)
    if arguments.out is not None:
        write_comparison(report, arguments.out)
        print(arguments.out, file=sys.stderr if arguments.json else sys.stdout)
    return 0


def run_tap(arguments: argparse.Namespace) -> int:
    """Tap a run until it ends or Ctrl-C."""
    from streamrl.history.tap import TapSettings, tap, tap_config
    from streamrl.runtime.run_bus import check_up
    from streamrl.runtime.rundir import RunDir
    from streamrl.runtime.worker import run_worker

    run = RunDir.find(arguments.run, base=arguments.dir)
    first = _number(arguments.first)
    settings = TapSettings(name=arguments.name, overrides=tuple(arguments.overrides), first=first, lease_s=arguments.lease_s)
    check_trust(loss_code(tap_config(run.load_config(), settings)), run.foreign, trusted=arguments.trust_code)
    check_up(run)

    async def main(worker: Worker) -> None:
        state = await tap(worker, settings, say=_say)
        print(f"tap {settings.name} of {run.name} stands at version {state.version}")

    return run_worker("trainer", run, main=main)


async def _replay(arguments: argparse.Namespace) -> int:
    import msgspec

    from streamrl.history.replay import TOLERANCE, verify
    from streamrl.history.source import open_source

    async with open_source(arguments.run, base=arguments.dir) as source:
        check_trust(loss_code(source.config), source.foreign, trusted=arguments.trust_code)
        report = await verify(
            source.config,
            source.log,
            source.model_dir,
            checkpoints=source.checkpoints,
            span=_span(arguments),
            config_difference=source.config_difference,
            initial_digest=source.initial_digest,
            highest=source.highest,
            tolerance=TOLERANCE if arguments.tolerance is None else arguments.tolerance,
            say=_say,
        )
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode({"ok": report.ok, **msgspec.to_builtins(report)}), indent=2).decode())
    else:
        print("\n".join(report.lines))
    return 1 if report.problem or (arguments.verify and not report.ok) else 0


async def _branch(arguments: argparse.Namespace) -> int:
    import msgspec

    from streamrl.config.load import override_keys
    from streamrl.history.branch import train_branch
    from streamrl.history.source import open_source
    from streamrl.monitor.summary import summary_line

    async with open_source(arguments.run, base=arguments.dir) as source:
        check_trust(loss_code(source.config), source.foreign, trusted=arguments.trust_code)
        run, summary = await train_branch(
            source, overrides=arguments.overrides, name=arguments.name, base=Path(arguments.dir), span=_span(arguments), say=_say
        )
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode({"run": run.name, **msgspec.to_builtins(summary)}), indent=2).decode())
    else:
        print(f"{run.name}: {summary_line(summary)}\n  {run.path}")
        if "run.steps" in override_keys(arguments.overrides):
            print(
                f"  run.steps set the schedule of its learning rate; it has the {summary.steps} steps of the log, which --to ends earlier"
            )
    return 0


async def _backtest(arguments: argparse.Namespace) -> int:
    import msgspec

    from streamrl.history.backtest import backtest_grid, print_backtest
    from streamrl.history.source import open_source

    source: Source
    async with open_source(arguments.run, base=arguments.dir) as source:
        report = await backtest_grid(source, arguments.overrides)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print_backtest(report)
    return 0


def _say(text: str) -> None:
    """What a trainer has to say, beside what the verb prints."""
    print(f"notice: {text}", file=sys.stderr, flush=True)


def _span(arguments: argparse.Namespace) -> Any:
    from streamrl.history.replay import Range

    return Range(first=_number(arguments.first or "0"), last=None if arguments.last is None else _number(arguments.last))


def _number(text: str) -> int:
    """The number of a version given as `17` or `0.17`."""
    from streamrl.schemas.versions import Version

    try:
        return int(text) if text.isdigit() else Version.parse(text).number
    except SchemaError as error:
        raise ConfigError(error.message, hint="the versions of a run are in its ledger; 17 is short for 0.17") from error


def _trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--trust-code", action="store_true", help="run the code that a recording, or another user's run, names")


def _overrides(verb: argparse.ArgumentParser, text: str) -> None:
    verb.add_argument("--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)


def _common(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON")
    verb.add_argument("--dir", default="runs", help="directory that holds the runs")
