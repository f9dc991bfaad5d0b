"""`import-slime`: a training script of slime as a configuration."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from streamrl.errors import ConfigError


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    importer = verbs.add_parser(
        "import-slime",
        help="write a configuration from a training script of slime",
        description="Read a training script of slime as text, nothing of it is run, and write what its arguments ask for as TOML. What is "
        "said on stderr is what is not the same. Exit code 1, and no TOML, if something is refused that --leave-out does not name.",
    )
    importer.add_argument("script", nargs="?", type=Path, metavar="SCRIPT", help="bash script that runs train.py or train_async.py")
    importer.add_argument("arguments", nargs="*", metavar="ARG", help="what the script is started with; flags among it behind --")
    importer.add_argument("-o", "--output", type=Path, metavar="TOML", help="file to write, which must not be there; default: stdout")
    importer.add_argument(
        "--var",
        dest="variables",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the environment that the script is started in, which is not read otherwise; may be repeated",
    )
    importer.add_argument("--cwd", type=Path, metavar="DIR", help="folder that the script is started in; default: the working directory")
    importer.add_argument("--rows", type=int, default=0, metavar="N", help="rows of the training data, for --num-epoch")
    importer.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="FLAG",
        help="do without a flag that is refused, without its dashes, or a variable that is not known; `all`: whatever is refused",
    )
    importer.add_argument("--json", action="store_true", help="print report and TOML as JSON")
    importer.add_argument(
        "--explain", nargs=argparse.REMAINDER, metavar="FLAG", help="say what becomes of flags of slime, and read no script"
    )
    importer.set_defaults(run_verb=run_import)


def run_import(arguments: argparse.Namespace) -> int:
    """Write the configuration; 1 if something is refused."""
    from streamrl.bridges.slime.script.draft import Options
    from streamrl.bridges.slime.script.importing import import_script
    from streamrl.bridges.slime.script.report import text_of
    from streamrl.monitor.drawing import visible_lines

    if arguments.explain is not None:
        return _explain(arguments.explain)
    if arguments.script is None:
        raise ConfigError("expected a training script of slime, got none", hint="`streamrl import-slime train.sh -o my.toml`")
    if arguments.rows < 0:
        raise ConfigError(f"expected --rows of at least 0, got {arguments.rows}", hint="it is the number of rows of the training data")
    if arguments.output is not None and arguments.output.exists():
        raise ConfigError(f"expected a new file, got one that is there: {arguments.output}", hint="remove it, or choose another name")
    done = import_script(
        arguments.script,
        arguments=arguments.arguments,
        variables=dict(map(_variable, arguments.variables)),
        cwd=arguments.cwd,
        leave_out=arguments.leave_out,
        options=Options(num_rows=arguments.rows),
    )
    if done.toml and arguments.output is not None:
        arguments.output.write_text(done.toml, encoding="utf-8")
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(done), indent=2).decode())
    else:
        if done.toml and arguments.output is None:
            print(done.toml, end="")
        print(visible_lines(text_of(done.report)), file=sys.stderr)  # it quotes the script
        print(_last_line(bool(done.toml), arguments.output), file=sys.stderr)
    return 0 if done.toml else 1


def _last_line(written: bool, output: Path | None) -> str:
    if not written:
        return "\nnot written: change the script, or leave out what is refused with --leave-out FLAG, or --leave-out all"
    where = "" if output is None else f"written: {output}\n"
    return (
        f"\n{where}next: streamrl doctor --plan {output or 'TOML'}, and on the machine that it is for, streamrl doctor {output or 'TOML'}"
    )


def _explain(names: Sequence[str]) -> int:
    from streamrl.bridges.slime.script.explain import explain

    if not names:
        raise ConfigError("expected a flag of slime behind --explain, got none", hint="`streamrl import-slime --explain --use-tis`")
    print("\n\n".join(explain(name) for name in names))
    return 0


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ConfigError(f"expected --var NAME=VALUE, got {text!r}", hint="for example --var BASE_DIR=/data")
    return name, value
