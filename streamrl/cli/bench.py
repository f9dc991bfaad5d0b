"""`bench`: the measurements are no part of the package; the verb finds them in a clone and hands its arguments on."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import streamrl
from streamrl.errors import LaunchError


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    # No argument begins with this prefix, so that all of them are taken as they are, `--help` too.
    bench = verbs.add_parser("bench", help="measure the product on this machine (from a clone)", add_help=False, prefix_chars="\0")
    bench.add_argument("arguments", nargs="*")
    bench.set_defaults(run_verb=run_bench)


def run_bench(arguments: argparse.Namespace) -> int:
    """Run `benchmarks.cli` of the clone that this package lies in; returns its exit code."""
    root = clone(Path(streamrl.__file__))
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    return importlib.import_module("benchmarks.cli").main(arguments.arguments)


def clone(module: Path) -> Path:
    """The clone that has `streamrl/__init__.py` at `module`; raises LaunchError when that is no clone but an installed package."""
    root = module.resolve().parents[1]
    # The second file is what tells a clone from a folder of packages in which something else is called benchmarks.
    if not (root / "benchmarks" / "cli.py").is_file() or not (root / "pyproject.toml").is_file():
        raise LaunchError(
            f"streamrl bench: expected streamrl from a clone of its repository, got an installed package in {root}",
            hint="the measurements are in the repository's folder benchmarks/, which is not in the wheel: in a clone, "
            "pip install --editable '.[bench]' and run streamrl bench again",
        )
    return root
