"""`doctor`: is the machine fit."""

from __future__ import annotations

import argparse
from typing import Any


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    doctor = verbs.add_parser("doctor", help="check that this machine can run streamrl")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--dir", default="runs", help="directory that will hold the runs")
    doctor.set_defaults(run_verb=run_doctor)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the checks; 1 if one of them failed."""
    from streamrl.launch.doctor import examine, print_checks

    checks = examine(arguments.dir)
    print_checks(checks, as_json=arguments.json)
    return 1 if any(check.state == "fail" for check in checks) else 0
