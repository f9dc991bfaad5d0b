"""`doctor`: is the machine fit."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from streamrl.errors import ConfigError


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    doctor = verbs.add_parser(
        "doctor",
        help="check that this machine can run streamrl",
        description="Check this machine, what a configuration asks of it, or the bus of a run. Exit code 1 if a check fails.",
    )
    doctor.add_argument("config", nargs="?", metavar="TOML", help="also check what this configuration asks for")
    doctor.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated"
    )
    doctor.add_argument(
        "--plan", action="store_true", help="check the TOML file alone: not this machine, nor whether paths, devices and packages are there"
    )
    doctor.add_argument("--run", help="also check what this run asks for, whether its bus answers, and its clock")
    doctor.add_argument(
        "--nats-accounts",
        action="store_true",
        help="print the accounts of the TOML file's run for the configuration of a nats-server of your own, and check nothing",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--dir", default="runs", help="directory that will hold the runs")
    doctor.set_defaults(run_verb=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the checks; 1 if one of them failed."""
    from streamrl.config.load import load
    from streamrl.doctor.findings import print_checks
    from streamrl.doctor.machine import examine, examine_config, examine_plan, examine_run
    from streamrl.launch.prepare import rehearse
    from streamrl.runtime.rundir import RunDir

    if arguments.config and arguments.run:
        raise ConfigError("expected a TOML file or --run, got both", hint="a run has a configuration of its own; leave one of them out")
    if arguments.overrides and not arguments.config:
        raise ConfigError(
            "--set needs a TOML file to be put over, got none", hint="for example `streamrl doctor my.toml --set bus.port=4222`"
        )
    if arguments.plan and not arguments.config:
        raise ConfigError("--plan checks a TOML file, got none", hint="for example `streamrl doctor my.toml --plan`")
    if arguments.nats_accounts:
        return _print_accounts(arguments)
    run = RunDir.find(arguments.run, base=arguments.dir) if arguments.run else None
    checks = [] if arguments.plan else examine(arguments.dir)
    if arguments.plan:
        checks += examine_plan(arguments.config, arguments.overrides)
    elif arguments.config:
        found = examine_config(arguments.config, arguments.overrides)
        checks += found
        if found[0].state == "ok":
            checks.append(asyncio.run(rehearse(load(arguments.config, arguments.overrides))))
    if run is not None:
        checks += examine_run(run)
    print_checks(checks, as_json=arguments.json)
    return 1 if any(check.state == "fail" for check in checks) else 0


def _print_accounts(arguments: argparse.Namespace) -> int:
    from streamrl.config.load import load
    from streamrl.doctor.accounts import accounts_text

    if not arguments.config:
        raise ConfigError("--nats-accounts needs a TOML file, got none", hint="for example `streamrl doctor my.toml --nats-accounts`")
    if arguments.json:
        raise ConfigError(
            "--nats-accounts prints configuration of nats-server, whose variables JSON does not have: no --json", hint="leave out --json"
        )
    print(accounts_text(load(arguments.config, arguments.overrides)))
    return 0
