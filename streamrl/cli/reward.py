"""`reward`: give or correct the reward of one rollout by hand."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

from streamrl.cli.numbers import finite, seconds
from streamrl.errors import ConfigError
from streamrl.schemas.subjects import TASKS

if TYPE_CHECKING:
    from streamrl.bus.protocol import Bus
    from streamrl.config.tree import Config
    from streamrl.history.fates import Fate
    from streamrl.runtime.rundir import RunDir


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    reward = verbs.add_parser("reward", help="give a rollout its reward, or correct it, before its group is trained")
    reward.add_argument("run", metavar="RUN", help="name or directory of the run")
    reward.add_argument("--task", type=int, required=True, help="task index")
    reward.add_argument("--rollout", type=int, required=True, help="index within the group")
    reward.add_argument("--reward", type=finite, required=True, help="a finite number")
    reward.add_argument(
        "--revision", type=int, default=1, help="a correction needs a higher one than the reward it replaces; 1 if left out"
    )
    reward.add_argument("--sample", type=int, help="the sample of the rollout that was judged; kept with the reward")
    reward.add_argument(
        "--agent", default="", metavar="NAME", help="the agent of the rollout whose own reward it is; left out: the rollout's"
    )
    reward.add_argument("--part", action="append", default=[], metavar="NAME=VALUE", help="a named part, kept with it; may be repeated")
    reward.add_argument(
        "--wait", dest="wait_s", type=seconds, default=5.0, metavar="SECONDS", help="how long to wait for the trainer's word"
    )
    reward.add_argument("--json", action="store_true", help="print JSON")
    reward.add_argument("--dir", default="runs", help="directory that holds the runs")
    reward.set_defaults(run_verb=run_reward)


def run_reward(arguments: argparse.Namespace) -> int:
    """Publish the reward and say what became of it; 1 if it is quarantined."""
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


async def _publish(run: RunDir, arguments: argparse.Namespace, parts: dict[str, float]) -> tuple[Fate, bool]:
    from streamrl.history.fates import Fates
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
            agent=arguments.agent,
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
    if rollout >= config.tasks.num_rollouts:
        raise ConfigError(
            f"expected --rollout from 0 to {config.tasks.num_rollouts - 1}, got {rollout}",
            hint=f"tasks.num_rollouts is {config.tasks.num_rollouts}; count from 0",
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
