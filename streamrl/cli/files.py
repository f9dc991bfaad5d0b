"""`init`, `config` and `completion`: files to begin with, and what editors and shells know about ours."""

from __future__ import annotations

import argparse
from typing import Any

from streamrl.errors import ConfigError

EXAMPLE = "quickstart"


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    init = verbs.add_parser("init", help="copy an example to begin with; overwrites nothing")
    init.add_argument("directory", nargs="?", metavar="DIR", help="where to; the example's name if left out")
    init.add_argument("--example", default=EXAMPLE, metavar="NAME", help=f"which one; {EXAMPLE} if left out, an unknown name lists them")
    init.set_defaults(run_verb=run_init)

    config = verbs.add_parser("config", help="print a whole configuration, or what editors know of one")
    config.add_argument("config", nargs="?", metavar="TOML", help="configuration file: printed as JSON, defaults included")
    config.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key; may be repeated"
    )
    config.add_argument("--schema", action="store_true", help="print a JSON schema of the file, for editors")
    config.set_defaults(run_verb=run_config)

    completion = verbs.add_parser("completion", help="print a script that completes streamrl's commands in a shell")
    completion.add_argument("shell", choices=("bash", "zsh"), help="whose: for example `source <(streamrl completion bash)` in ~/.bashrc")
    completion.set_defaults(run_verb=run_completion)


def run_init(arguments: argparse.Namespace) -> int:
    """Copy an example and say what starts it."""
    from pathlib import Path

    from streamrl.cli.examples import copy_example, next_commands

    folder = Path(arguments.directory or arguments.example)
    copied = copy_example(arguments.example, folder)
    print(f"copied {len(copied)} files to {folder}/: {', '.join(path.name for path in copied)}")
    print("next:", *(f"  {command}" for command in next_commands(copied)), sep="\n")
    return 0


def run_config(arguments: argparse.Namespace) -> int:
    """Print the schema, or a file's whole configuration."""
    import json

    from streamrl.config.load import dump, load
    from streamrl.config.schema import config_schema
    from streamrl.config.secret_options import without_secrets
    from streamrl.doctor.backend import refuse_backend

    if arguments.schema == bool(arguments.config):
        raise ConfigError("expected a TOML file or --schema", hint="for example `streamrl config --schema > streamrl.schema.json`")
    if arguments.schema:
        print(json.dumps(config_schema(), indent=2))
    else:
        config = load(arguments.config, arguments.overrides)
        refuse_backend(config)
        print(dump(without_secrets(config)[0]), end="")
    return 0


def run_completion(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from streamrl.cli import parser
    from streamrl.cli.completion import completion_script

    print(completion_script(parser(), arguments.shell), end="")
    return 0
