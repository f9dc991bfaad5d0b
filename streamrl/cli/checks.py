"""`doctor` and `replay`: is the machine fit, and does a run's log give its ledger again."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import TYPE_CHECKING, Any

from streamrl.errors import ConfigError

if TYPE_CHECKING:
    from streamrl.consumers.replay import ReplayReport
    from streamrl.runtime.rundir import RunDir


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    doctor = verbs.add_parser("doctor", help="check that this machine can run streamrl")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--dir", default="runs", help="directory that will hold the runs")
    doctor.set_defaults(run_verb=run_doctor)

    replay = verbs.add_parser("replay", help="train a run's log again and compare with its ledger")
    replay.add_argument("run", metavar="RUN", help="name or directory of the run")
    replay.add_argument("--verify", action="store_true", help="compare every version's digest with the ledger")
    replay.add_argument("--json", action="store_true", help="print JSON")
    replay.add_argument("--dir", default="runs", help="directory that holds the runs")
    replay.set_defaults(run_verb=run_replay)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the checks; 1 if one of them failed."""
    from streamrl.launch.doctor import examine, print_checks

    checks = examine(arguments.dir)
    print_checks(checks, as_json=arguments.json)
    return 1 if any(check.state == "fail" for check in checks) else 0


def run_replay(arguments: argparse.Namespace) -> int:
    """Replay a run; 1 if a digest differs."""
    if not arguments.verify:
        raise ConfigError("replay needs to know what for, got no --verify", hint="`streamrl replay RUN --verify` compares with the ledger")
    import msgspec

    from streamrl.runtime.rundir import RunDir

    report = asyncio.run(_verify(RunDir.find(arguments.run, base=arguments.dir)))
    if arguments.json:
        print(json.dumps({"ok": report.ok, **msgspec.to_builtins(report)}, indent=2))
    else:
        print("\n".join(report.lines))
    return 0 if report.ok else 1


async def _verify(run: RunDir) -> ReplayReport:
    from streamrl.consumers.replay import verify
    from streamrl.launch.opened import opened

    config = run.load_config()
    async with opened(run) as bus:
        return await verify(config, bus, run.policy_dir(config))
