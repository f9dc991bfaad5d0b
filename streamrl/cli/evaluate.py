"""`eval`: sets of problems asked of a run's version or of a model directory."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.config.code import check_trust, engine_code, reward_addresses, rollout_code
from streamrl.config.evaluation_sets import ProblemSet
from streamrl.config.loss import LossConfig
from streamrl.config.tree import Config
from streamrl.errors import ConfigError

_WIDTH = 120


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    evaluate = verbs.add_parser("eval", help="ask sets of problems of a run's version, or of a model directory")
    evaluate.add_argument("subject", metavar="RUN|DIR", help="name or directory of a run, up or not, or a model directory")
    evaluate.add_argument("--version", metavar="V", help="of a run: 17 or 0.17; without it the newest that there is")
    evaluate.add_argument(
        "--set", dest="sets", action="append", default=[], metavar="NAME=PATH", help="ask this set alone; may be repeated"
    )
    evaluate.add_argument("--config", type=Path, metavar="TOML", help="of a model directory: engine, sets, rewards; data.train is not read")
    evaluate.add_argument(
        "--with", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated"
    )
    evaluate.add_argument("--out", type=Path, metavar="DIR", help="folder of answers and results; the same one again goes on there")
    evaluate.add_argument("--trust-code", action="store_true", help="run the code that another user's run names")
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.add_argument("--dir", default="runs", help="directory that holds the runs")
    evaluate.set_defaults(run_verb=run_eval)


def run_eval(arguments: argparse.Namespace) -> int:
    """Ask, and print what came out."""
    details = asyncio.run(_eval(arguments))
    if arguments.json:
        print(json.dumps(details, indent=2))
    return 0


async def _eval(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from streamrl.config.load import override
    from streamrl.history import evaluate as asked

    def said(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def note(text: str) -> None:
        print(f"note: {text}", file=sys.stderr)

    out: Path | None = arguments.out.absolute() if arguments.out else None
    path = Path(arguments.subject)
    if asked.model_kind(path):
        if arguments.version is not None:
            raise ConfigError(f"--version is for runs, got it for the model directory {path}", hint="leave it out")
        config = asked.config_of_directory(path, arguments.config, arguments.overrides)
        config, sets = await _checked(config, arguments.sets)
        subject = asked.directory_subject(path, out)
        details = await asked.evaluate_subject(config, sets, subject, said=said, note=note)
    else:
        run = _run(arguments.subject, arguments.dir)
        if arguments.config is not None:
            raise ConfigError("--config is for model directories: a run has its own", hint="change single keys with --with")
        config = override(run.with_secret_options(run.load_config()), arguments.overrides)
        named = {**rollout_code(config), **reward_addresses(config), **engine_code(config)}
        check_trust(named, run.foreign, trusted=arguments.trust_code)
        config, sets = await _checked(config, arguments.sets)
        async with asked.run_subject(run, config, arguments.version, out) as subject:
            details = await asked.evaluate_subject(config, sets, subject, said=said, note=note)
    said("")
    if not arguments.json:
        _print(subject.name, details, subject.out)
    return details


async def _checked(config: Config, named: Sequence[str]) -> tuple[Config, tuple[ProblemSet, ...]]:
    """The configuration with the sets that were named, and those that are to be asked, whose code can be loaded."""
    from streamrl.history.evaluate import with_sets
    from streamrl.launch.code_check import check_code

    config, sets = with_sets(config, named)
    await check_code(replace(config, loss=LossConfig()))  # nothing is trained
    return config, sets


def _run(text: str, base: str) -> Any:
    from streamrl.runtime.rundir import RunDir

    try:
        return RunDir.find(text, base=base)
    except ConfigError as error:
        if not Path(text).is_dir():
            raise
        raise ConfigError(
            f"expected a run or a model directory, got {text}, which has neither a run's nor a model's config.json",
            hint=error.hint,
            path=text,
        ) from error


def _print(name: str, details: Sequence[dict[str, Any]], out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=name, title_justify="left", box=None, padding=(0, 1))
    for column in ("set", "problems", "mean", "95 %", "pass", "majority", "truncated", "failed", "tokens", "time"):
        table.add_column(column, justify="left" if column == "set" else "right", no_wrap=True)
    for one in details:
        answered, samples = one["answered"], one["samples"]
        table.add_row(
            one["set"],
            f"{one['num']} x {one['n']}",
            "-" if one["accuracy"] is None else f"{one['accuracy']:.4f}",
            "-" if one["interval"] is None else "{:.4f} .. {:.4f}".format(*one["interval"]),
            _largest(one["pass"]),
            _largest(one["majority"]),
            "-" if not answered else f"{one['truncated'] / answered:.1%}",
            f"{one['failed'] / samples:.1%}",
            f"{one['tokens']['mean']:.1f}",
            f"{one['took_s']:.1f} s",
        )
    console = Console()
    console.width = max(console.width, _WIDTH)
    console.print(table)
    for one in details:
        if one["resumed"]:
            print(f"{one['set']}: {one['resumed']} of {one['num']} problems had been answered before, in the same folder")
        for reason, count in one["reasons"].items():
            print(f"{one['set']}: {count} failed: {reason}")
    print(f"answers and results: {out}")


def _largest(found: dict[str, dict[str, float]]) -> str:
    """The one of the largest k; the others are in the file."""
    k = max(found, key=int, default="")
    return f"@{k} {found[k]['value']:.4f}" if k else "-"
