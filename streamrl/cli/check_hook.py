"""`check-hook`: a function written for slime, called once as a run would call it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from typing import Any

from streamrl.cli.numbers import seconds
from streamrl.errors import ConfigError


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    check = verbs.add_parser(
        "check-hook",
        help="call a function written for slime with a made-up task, and say what is wrong with it",
        description="Load a hook of slime's, look at its signature, and call it as a run would, in a process of its own; exit code 1 if it "
        "is not of its form, raises, hangs, or gives what cannot be used. docs/slime-hooks.md has the hooks.",
    )
    check.add_argument("hook", metavar="HOOK", help="its name, such as custom_rm_path or custom-rm-path")
    check.add_argument("function", metavar="FUNCTION", help="file.py:name, pkg.mod:name or pkg.mod.name")
    check.add_argument("--group-rm", action="store_true", help="a reward of all samples of a group")
    check.add_argument("--args", metavar="JSON", default="{}", help="values of your own in args, as [slime] custom_config has them")
    check.add_argument("--options", metavar="JSON", default="{}", help="keyword arguments, as reward.options has them")
    check.add_argument("--metadata", metavar="JSON", default="{}", help="metadata of the sample")
    check.add_argument("--reward-key", default="", help="the part of a reward that is trained, as reward.key has it")
    check.add_argument("--limit", type=seconds, default=60.0, metavar="SECONDS", help="how long import and calls may take (default 60)")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run_verb=run_check_hook)


def run_check_hook(arguments: argparse.Namespace) -> int:
    """Print what the hook gave; raises ConfigError for what is wrong with it."""
    from streamrl.bridges.slime.check_hook import flag_of, try_hook
    from streamrl.bridges.slime.contracts import Asked
    from streamrl.bridges.slime.known import HOOKS

    flag = flag_of(arguments.hook)
    if arguments.group_rm and flag != "custom_rm_path":
        raise ConfigError(f"--group-rm is for custom_rm_path, got {flag}", hint="leave it out")
    own = _table(arguments.args, "--args")
    if own and HOOKS[flag].is_in_trainer:
        raise ConfigError(
            f"--args is for hooks outside of the trainer, {flag} finds in args what the section loss says",
            hint="leave it out, and keep values of your own in the function's file",
        )
    asked = Asked(
        flag,
        arguments.function,
        group=arguments.group_rm,
        args=own,
        options=_table(arguments.options, "--options"),
        reward_key=arguments.reward_key,
        metadata=_table(arguments.metadata, "--metadata"),
    )
    gave = asyncio.run(try_hook(asked, limit_s=arguments.limit, surroundings=os.environ))
    if arguments.json:
        print(json.dumps({"hook": flag, "function": arguments.function, "gave": gave}, indent=2))
    else:
        print("\n".join([f"{flag} = {arguments.function!r} is of its form, and was called:", *(f"  {line}" for line in gave)]))
    return 0


def _table(text: str, option: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"expected JSON behind {option}, got {text!r:.80}: {error}", hint="such as '{\"turns\": 2}'") from error
    if not isinstance(found, dict):
        raise ConfigError(f"expected a table behind {option}, got {text!r:.80}", hint="such as '{\"turns\": 2}'")
    return found
