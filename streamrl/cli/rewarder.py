"""`rewarder`: one more process that scores a run's rollouts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.cli.workers import stoppable
from streamrl.config.code import check_trust, judging_code, reward_addresses

if TYPE_CHECKING:
    from streamrl.runtime.rundir import RunDir
    from streamrl.runtime.worker import Worker


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    rewarder = verbs.add_parser("rewarder", help="score rollouts for a run with reward.workers; Ctrl-C leaves again")
    rewarder.add_argument("--run", help="name or directory of the run")
    rewarder.add_argument(
        "--credentials",
        type=Path,
        metavar="FILE",
        help="in place of --run, on another host: what `streamrl credentials --role rewarder` wrote",
    )
    rewarder.add_argument("--bus", default="", metavar="URL", help="with --credentials: where the bus is from here")
    rewarder.add_argument(
        "--reward", default="", metavar="FILE.py:NAME", help="with --credentials: the run's own reward, where that is user code"
    )
    rewarder.add_argument("--concurrency", type=int, help="groups in flight; producer.concurrency if left out")
    rewarder.add_argument("--dir", default="runs", help="directory that holds the runs")
    rewarder.add_argument("--trust-code", action="store_true", help="run the code that another user's run names")
    rewarder.set_defaults(run_verb=stoppable(run_rewarder))


def run_rewarder(arguments: argparse.Namespace) -> int:
    """Score until Ctrl-C, until the run has finished, or until it is down."""
    import asyncio

    from streamrl.cli.workers import attached_run, check_concurrency, went_down
    from streamrl.config.load import override
    from streamrl.producers.rewarder import check_wanted, join
    from streamrl.runtime.run_bus import check_up
    from streamrl.runtime.worker import run_worker

    elsewhere = arguments.credentials is not None
    run: RunDir = attached_run(arguments, role="rewarder")
    config = run.load_config()
    check_wanted(config)
    check_trust({**judging_code(config), **reward_addresses(config)}, run.foreign, trusted=arguments.trust_code)
    check_concurrency(arguments)
    if not elsewhere:
        check_up(run)

    async def serve(worker: Worker) -> None:
        if arguments.concurrency is not None:
            worker.config = override(worker.config, [f"producer.concurrency={arguments.concurrency}"])
        working = asyncio.create_task(join(worker))
        if not await went_down(worker, working, elsewhere=elsewhere):
            working.result()
            print(f"{worker.name} has left run {run.name}")

    return run_worker("rewarder", run, main=serve)
