"""`worker`, `attach` and `credentials`: single processes of a run, and what one needs elsewhere."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.config.check_data import check_gateway, check_looks
from streamrl.config.code import check_trust, engine_code, judging_code, loss_code, reward_addresses, rollout_code
from streamrl.config.data import has_images
from streamrl.errors import ConfigError
from streamrl.runtime.kinds import MAINS, USER_CODE
from streamrl.runtime.service import SUPERVISOR_VARIABLE, stops_at_once
from streamrl.schemas.subjects import MAIN_SOURCE, WARMUP_SOURCE

if TYPE_CHECKING:
    from streamrl.runtime.rundir import RunDir
    from streamrl.runtime.worker import Worker


def add_verbs(verbs: Any) -> None:
    """Add the verbs to argparse's sub-parsers."""
    worker = verbs.add_parser("worker", help="run one worker of a run in the foreground")
    worker.add_argument("kind", metavar="KIND", help=", ".join(MAINS))
    worker.add_argument("--run", required=True, help="name or directory of the run")
    worker.add_argument("--index", type=int, help="number within the kind; the first free one if left out")
    worker.add_argument("--dir", default="runs", help="directory that holds the runs")
    _trust(worker)
    worker.set_defaults(run_verb=stoppable(run_worker_verb))

    attach = verbs.add_parser("attach", help="join a running run with your own producer; Ctrl-C leaves again")
    attach.add_argument("function", metavar="FILE.py:NAME", help="function of (task, engine) that returns an episode, or single_turn")
    attach.add_argument("--run", help="name or directory of the run")
    attach.add_argument(
        "--credentials", type=Path, metavar="FILE", help="in place of --run, on another host: what `streamrl credentials` wrote"
    )
    attach.add_argument("--bus", default="", metavar="URL", help="with --credentials: where the bus is from here, such as a tunnel's end")
    attach.add_argument(
        "--reward", default="", metavar="FILE.py:NAME", help="with --credentials: the run's own reward, where that is user code"
    )
    attach.add_argument("--source", default="main", help="task source to claim from")
    attach.add_argument("--concurrency", type=int, help="tasks in flight; producer.concurrency if left out")
    attach.add_argument("--dir", default="runs", help="directory that holds the runs")
    _trust(attach)
    attach.set_defaults(run_verb=stoppable(run_attach))

    credentials = verbs.add_parser("credentials", help="write a file with which a process of another host can join a run")
    credentials.add_argument("run", metavar="RUN", help="name or directory of the run")
    credentials.add_argument(
        "--role", choices=("producer", "rewarder"), default="producer", help="whose: for `attach` (producer) or for `rewarder`"
    )
    credentials.add_argument("--out", required=True, type=Path, metavar="FILE", help="where to; readable by you only")
    credentials.add_argument("--dir", default="runs", help="directory that holds the runs")
    credentials.set_defaults(run_verb=run_credentials)


def stoppable(run_verb: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """The verb of a worker that ends at once, and cleanly, when it is told to stop while it starts."""

    def run(arguments: argparse.Namespace) -> int:
        with stops_at_once():
            return run_verb(arguments)

    return run


def _trust(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--trust-code", action="store_true", help="run the code that another user's run names")


def run_worker_verb(arguments: argparse.Namespace) -> int:
    """Run one worker until it is over."""
    from streamrl.runtime.kinds import check_kind
    from streamrl.runtime.run_bus import check_up
    from streamrl.runtime.rundir import RunDir
    from streamrl.runtime.worker import run_worker

    kind = check_kind(arguments.kind)
    if arguments.index is not None and arguments.index < 0:
        raise ConfigError(f"expected --index of at least 0, got {arguments.index}", hint="leave it out for the first free one")
    run = RunDir.find(arguments.run, base=arguments.dir)
    config = run.load_config()
    if kind == "gateway":
        check_gateway(config)
    named = (
        {**rollout_code(config), **reward_addresses(config), **loss_code(config)}
        if kind in (*USER_CODE, "trainer", "feeder")
        else engine_code(config)
        if kind == "engine"
        else {}
    )
    check_trust(named, run.foreign, trusted=arguments.trust_code)
    if SUPERVISOR_VARIABLE not in os.environ:  # on another node its run directory is not the one that the supervisor has locked
        check_up(run)
    return run_worker(kind, run, arguments.index)


def run_attach(arguments: argparse.Namespace) -> int:
    """Claim tasks of a running run and roll them out with the user's function until Ctrl-C, or until the run is down."""
    from streamrl.config.load import override
    from streamrl.producers.rollouts import attach, check_reward
    from streamrl.runtime.run_bus import check_up
    from streamrl.runtime.worker import run_worker

    async def main(worker: Worker) -> None:
        if elsewhere and not worker.config.reward.workers:
            await check_reward(worker)
        if arguments.concurrency is not None:
            worker.config = override(worker.config, [f"producer.concurrency={arguments.concurrency}"])
        working = asyncio.create_task(attach(worker, arguments.function, source=arguments.source))
        if not await went_down(worker, working, elsewhere=elsewhere):
            print(f"{worker.name} has left run {worker.run_dir.name} after {working.result()} tasks")

    elsewhere = arguments.credentials is not None
    run = attached_run(arguments, role="producer")
    if arguments.source not in (MAIN_SOURCE, WARMUP_SOURCE):
        raise ConfigError(
            f"expected --source {MAIN_SOURCE} or {WARMUP_SOURCE}, got {arguments.source!r}", hint=f"leave it out for {MAIN_SOURCE}"
        )
    config = run.load_config()
    if has_images(config.data):
        check_looks(arguments.function)
    named = {**judging_code(config), **reward_addresses(config)}
    check_trust(named, run.foreign, trusted=arguments.trust_code)
    check_concurrency(arguments)
    if not elsewhere:
        check_up(run)
    return run_worker("producer", run, main=main)


async def went_down(worker: Worker, working: asyncio.Task[Any], *, elsewhere: bool = False) -> bool:
    """Wait until `working` has ended, or until the run is down: then it is cancelled, and that is printed. Whether the run is down.

    Of a run `elsewhere`, on another host, nothing but its end is known; while its bus is away, so is all work.
    """
    from streamrl.runtime.run_bus import until_down

    down = asyncio.create_task(asyncio.Event().wait() if elsewhere else until_down(worker.run_dir))
    await asyncio.wait((working, down), return_when=asyncio.FIRST_COMPLETED)
    down.cancel()
    if working.done():
        return False
    # Its leases lapse on the bus's store; a run that comes up again delivers what it held to others.
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
    print(f"{worker.name} has left run {worker.run_dir.name}: it is down")
    return True


def check_concurrency(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for a --concurrency below 1."""
    if arguments.concurrency is not None and arguments.concurrency < 1:
        raise ConfigError(
            f"expected --concurrency of at least 1, got {arguments.concurrency}", hint="leave it out for producer.concurrency"
        )


def attached_run(arguments: argparse.Namespace, *, role: str) -> RunDir:
    """The run that --run or --credentials names; raises ConfigError."""
    from streamrl.runtime.attach_file import unpack_attach_file
    from streamrl.runtime.rundir import RunDir

    if (arguments.run is None) == (arguments.credentials is None):
        raise ConfigError(
            "expected one of --run and --credentials", hint="--run for a run of this host, --credentials FILE for one elsewhere"
        )
    if arguments.run is not None:
        if arguments.bus or arguments.reward:
            raise ConfigError("--bus and --reward go with --credentials", hint="a run directory says both")
        return RunDir.find(arguments.run, base=arguments.dir)
    return unpack_attach_file(arguments.credentials, Path(arguments.dir), role=role, bus_url=arguments.bus, reward=arguments.reward)


def run_credentials(arguments: argparse.Namespace) -> int:
    """Write what a producer or rewarder of another host needs."""
    from streamrl.runtime.attach_file import write_attach_file
    from streamrl.runtime.rundir import RunDir
    from streamrl.system import is_loopback

    run = RunDir.find(arguments.run, base=arguments.dir)
    config = run.load_config()
    if arguments.role == "rewarder":
        from streamrl.producers.rewarder import check_wanted

        check_wanted(config)
    write_attach_file(run, arguments.out, role=arguments.role)
    can = (
        "store samples in run {}, and ask its engines" if arguments.role == "producer" else "store rewards in run {}, and end its rollouts"
    )
    print(f"written: {arguments.out}; whoever has it can {can.format(run.name)}")
    if not config.bus.url and is_loopback(config.bus.host):
        print("its bus listens on this host only: bus.host is where others reach it, or bring them here with a tunnel and --bus")
    if arguments.role == "producer" and is_loopback(config.engine.host) and not config.engine.advertise:
        print("its engines too: engine.host is where others reach them")
    return 0
