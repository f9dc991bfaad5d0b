"""`reward`: give or correct the reward of one rollout by hand, or check what a reward says of a file of answers."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from streamrl.cli.numbers import finite, seconds
from streamrl.errors import ConfigError
from streamrl.schemas.subjects import TASKS

if TYPE_CHECKING:
    from streamrl.bus.protocol import Bus
    from streamrl.config.tree import Config, RewardConfig
    from streamrl.history.dead_letters import Fate
    from streamrl.runtime.rundir import RunDir


_BY_HAND = ("task", "rollout", "reward", "revision", "sample", "agent", "part", "wait_s")


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    reward = verbs.add_parser(
        "reward",
        help="give a rollout its reward, or correct it, before its group is trained; or check a reward on a file (--check)",
        description="Give a rollout its reward: RUN --task T --rollout K --reward R. Or grade a file and publish nothing: --check FILE "
        "with the reward of RUN or of --kind; exit code 1 if a grader fails or a row's `expected` differs.",
    )
    reward.add_argument("run", metavar="RUN", nargs="?", help="name or directory of the run; with --check also a TOML file")
    by_hand = reward.add_argument_group("by hand")
    by_hand.add_argument("--task", type=int, help="task index")
    by_hand.add_argument("--rollout", type=int, help="index within the group")
    by_hand.add_argument("--reward", type=finite, help="a finite number")
    by_hand.add_argument("--revision", type=int, help="a correction needs a higher one than the reward it replaces; 1 if left out")
    by_hand.add_argument("--sample", type=int, help="the sample of the rollout that was judged; kept with the reward")
    by_hand.add_argument("--agent", metavar="NAME", help="the agent of the rollout whose own reward it is; left out: the rollout's")
    by_hand.add_argument("--part", action="append", default=[], metavar="NAME=VALUE", help="a named part, kept with it; may be repeated")
    wait = "how long to wait for the trainer's word (default 5)"
    by_hand.add_argument("--wait", dest="wait_s", type=seconds, metavar="SECONDS", help=wait)
    check = reward.add_argument_group("check")
    check.add_argument("--check", metavar="FILE", help="JSONL rows with prompt, label, completion or turns, metadata, expected")
    check.add_argument("--kind", help="the reward, as reward.kind has it, in place of the run's")
    check.add_argument("--options", metavar="JSON", help="its options, a table")
    check.add_argument("--trust-code", action="store_true", help="run the code that another user's run names")
    reward.add_argument("--json", action="store_true", help="print JSON")
    reward.add_argument("--dir", default="runs", help="directory that holds the runs")
    reward.set_defaults(run_verb=run_reward)


def run_reward(arguments: argparse.Namespace) -> int:
    """Publish the reward and say what became of it; 1 if it is quarantined. With --check as `run_check`."""
    if arguments.check is not None:
        return run_check(arguments)
    _only(arguments, "without --check", _BY_HAND[:3], absent=("kind", "options"))
    if arguments.run is None:
        raise ConfigError("expected RUN, whose rollout gets the reward, got none", hint="or --check FILE, which needs no run")
    arguments.revision = 1 if arguments.revision is None else arguments.revision
    arguments.wait_s = 5.0 if arguments.wait_s is None else arguments.wait_s
    from streamrl.runtime.rundir import RunDir

    run = RunDir.find(arguments.run, base=arguments.dir)
    parts = dict(_part(text) for text in arguments.part)
    fate, duplicate = asyncio.run(_publish(run, arguments, parts))
    if arguments.json:
        print(json.dumps({"sequence": fate.sequence, "duplicate": duplicate, "state": fate.state, "detail": fate.detail}, indent=2))
    else:
        known = f"; revision {arguments.revision} had been published before, so this one changes nothing" if duplicate else ""
        print(f"reward of task {arguments.task} rollout {arguments.rollout} stored at {fate.line}{known}")
    return 1 if fate.state == "quarantined" else 0


def _only(arguments: argparse.Namespace, when: str, needed: Sequence[str], *, absent: Sequence[str]) -> None:
    """Raise ConfigError unless these options are given, and those are not."""
    option = {"wait_s": "--wait"}
    for name in (*needed, *absent):
        given = getattr(arguments, name) not in (None, [])
        if given != (name in needed):
            spelled, wanted = option.get(name, f"--{name}"), "" if name in needed else "no "
            raise ConfigError(f"expected {wanted}{spelled} {when}", hint="see streamrl reward --help", option=spelled)


def run_check(arguments: argparse.Namespace) -> int:
    """Grade a file and print what each grader said; 1 if one failed, or gave another reward than was expected."""
    from streamrl.history.grade_file import grade, graded_text, read_rows, summary_of

    _only(arguments, "with --check", (), absent=_BY_HAND)
    config, reward = _reward_to_check(arguments)
    rows = read_rows(Path(arguments.check), config.data)
    graded = asyncio.run(grade(rows, reward, config))
    summary = summary_of(graded)
    if arguments.json:
        told = {"rows": graded, "summary": summary}
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        print(graded_text(graded))
    return 0 if summary.held else 1


def _reward_to_check(arguments: argparse.Namespace) -> tuple[Config, RewardConfig]:
    """The configuration that says how graders are run, and the reward."""
    from streamrl.config.code import check_trust, judging_code, reward_addresses
    from streamrl.config.load import load
    from streamrl.config.tree import Config
    from streamrl.history.inspect_again import reward_config
    from streamrl.runtime.rundir import RunDir

    if arguments.run is None and arguments.kind is None:
        raise ConfigError("expected the reward to check, got neither RUN nor --kind", hint="for example --kind my_reward.py:score")
    if arguments.options is not None and arguments.kind is None:
        raise ConfigError("expected no --options without --kind", hint="a run's reward has the options of its configuration")
    if arguments.run is None:
        config = Config()
    elif arguments.run.endswith(".toml"):
        config = load(arguments.run)
    else:
        run = RunDir.find(arguments.run, base=arguments.dir)
        config = run.with_secret_options(run.load_config())
        if arguments.kind is None:
            named = {key: name for key, name in {**judging_code(config), **reward_addresses(config)}.items() if key.startswith("reward.")}
            check_trust(named, run.foreign, trusted=arguments.trust_code)
    if arguments.kind is None:
        return config, reward_config(config, "")
    try:
        options = msgspec.json.decode(arguments.options or "{}", type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeEncodeError) as error:
        raise ConfigError(f"expected --options as a JSON table, got {arguments.options!r}: {error}") from error
    by_name = not arguments.kind.partition(":")[0].endswith(".py")
    reward = replace(config.reward, kind=arguments.kind, options={}, key="") if by_name else reward_config(config, arguments.kind)
    checked = replace(config, reward=replace(reward, options=options))
    return checked, reward_config(checked, "")


async def _publish(run: RunDir, arguments: argparse.Namespace, parts: dict[str, float]) -> tuple[Fate, bool]:
    from streamrl.history.dead_letters import Fates
    from streamrl.producers.late import LateRewards
    from streamrl.runtime.lock import holder
    from streamrl.runtime.run_bus import open_bus
    from streamrl.schemas.subjects import Subjects

    config = run.load_config()
    subjects = Subjects(config.run.name)
    up = bool(config.bus.url) or holder(run) is not None
    async with open_bus(run) as bus:
        await _check_issued(bus, config, arguments.task, arguments.rollout)
        receipt = await LateRewards(bus, subjects).publish(
            arguments.task,
            arguments.rollout,
            arguments.reward,
            revision=arguments.revision,
            sample=arguments.sample,
            agent=arguments.agent or "",
            parts=parts,
        )
        fates = Fates(bus, subjects, config.trainer.name)
        # A run that is not up has no trainer that could say anything before it goes on.
        fate = await fates.of_message(receipt.sequence, task=arguments.task, wait_s=arguments.wait_s if up else 0.0)
        return fate, receipt.duplicate


async def _check_issued(bus: Bus, config: Config, task: int, rollout: int) -> None:
    """Raise ConfigError for what can be the reward of nothing: it would wait on the stream for ever."""
    issued = (await bus.state(TASKS)).last
    if task >= issued:
        there = f"0 to {issued - 1} have been issued" if issued else "none has been issued yet"
        raise ConfigError(f"expected --task of a task of run {config.run.name!r}, of which {there}, got {task}", hint="count from 0")
    if rollout >= config.group_size:
        greedy = ", and one is greedy" if config.group_size > config.tasks.num_rollouts else ""
        raise ConfigError(
            f"expected --rollout from 0 to {config.group_size - 1}, got {rollout}",
            hint=f"tasks.num_rollouts is {config.tasks.num_rollouts}{greedy}; count from 0",
        )


def _part(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = float("nan")
    if not name or not math.isfinite(value):
        raise ConfigError(f"expected --part NAME=VALUE with a finite number, got {text!r}", hint="for example --part format=0.5")
    return name, value
