"""`gateway`: an OpenAI URL for each session of a run."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from streamrl.cli.workers import stoppable

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker


def add_verbs(verbs: Any) -> None:
    """Add the verb to argparse's sub-parsers."""
    gateway = verbs.add_parser("gateway", help="give agents an OpenAI URL to make a run's rollouts with; Ctrl-C leaves again")
    gateway.add_argument("--run", required=True, help="name or directory of the run")
    gateway.add_argument("--port", type=_port, help="to listen on; gateway.port if left out")
    gateway.add_argument("--host", help="to listen on; gateway.host if left out")
    gateway.add_argument("--show", action="store_true", help="only say where the gateways of the run are, and where their key is")
    gateway.add_argument("--dir", default="runs", help="directory that holds the runs")
    gateway.add_argument("--trust-code", action="store_true", help="run the code that another user's run names")
    gateway.set_defaults(run_verb=stoppable(run_gateway))


def run_gateway(arguments: argparse.Namespace) -> int:
    """Serve agents until Ctrl-C, or until the run is down."""
    from streamrl.cli.workers import went_down
    from streamrl.config.check_data import check_gateway
    from streamrl.config.code import check_trust, judging_code, reward_addresses
    from streamrl.config.load import override
    from streamrl.producers.gateway.worker import addresses, main
    from streamrl.runtime.run_bus import check_up
    from streamrl.runtime.rundir import RunDir
    from streamrl.runtime.worker import run_worker

    run = RunDir.find(arguments.run, base=arguments.dir)
    if arguments.show:
        for name, address in addresses(run).items():
            print(f"{name}: {address}/v1")
        print(f"key: {run.gateway_key_path}")
        return 0
    changes = [f"gateway.host={arguments.host}"] if arguments.host is not None else []
    override(run.load_config(), changes)  # what is wrong with them is said before anything starts
    config = run.load_config()
    check_gateway(config)
    named = {**judging_code(config), **reward_addresses(config)}
    check_trust(named, run.foreign, trusted=arguments.trust_code)
    check_up(run)

    async def serve(worker: Worker) -> None:
        config = override(worker.config, changes)
        worker.config = config

        def say(address: str) -> None:
            print(f"{worker.name} serves {address}; sessions are started with the key in {run.gateway_key_path}", flush=True)

        working = asyncio.create_task(main(worker, port=arguments.port, listens=say))
        if not await went_down(worker, working):
            working.result()

    return run_worker("gateway", run, main=serve)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"expected a port from 0 to 65535, got {text!r}")
    return int(text)
