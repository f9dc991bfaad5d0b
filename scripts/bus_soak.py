"""Resident memory of nats-server under many requests: `python scripts/bus_soak.py [--pulls 1000000] [--every 50000] ...`.

The server is started as `up` starts it, an account a role. As the producer, `--claimers` coroutines claim tasks and give them back, so
that the queue stays as it is and no new message ids are remembered; a claim finds tasks at once, or waits for one, as in a run. As the
trainer, a sample is fetched for each. Prints a JSON line every `--every` pulls; the last one has the slope over the second half.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from streamrl.bus import connect
from streamrl.bus.address import OPERATOR
from streamrl.bus.jetstream.bus import JetStreamBus
from streamrl.bus.permissions import ROLES, role_users
from streamrl.bus.server import NatsServer
from streamrl.bus.topology import MEBIBYTE
from streamrl.schemas.subjects import MAIN_SOURCE, SAMPLES, Subjects

RUN = "soak"
SAMPLE_BYTES = 8192
NUM_SAMPLES = 1024


class Counts:
    """Counters of what has been asked so far."""

    def __init__(self) -> None:
        self.pulls = 0
        self.waited = 0
        """Claims that found no task at first."""
        self.leases = 0
        self.reads = 0


async def soak(given: argparse.Namespace, directory: Path) -> None:
    """Ask until there were `--pulls` pulls, and report on the way."""
    users = role_users(RUN, [(role, f"password of {role}") for role in (OPERATOR, *ROLES)])
    server = NatsServer(directory, users=users)
    server.start()
    try:
        by_role = {user.role: server.address_of(user) for user in users}
        operator = await connect(by_role[OPERATOR], RUN)
        producer = await connect(by_role["producer"], RUN, create=False)
        trainer = await connect(by_role["trainer"], RUN, create=False)
        subjects = Subjects(RUN)
        for _ in range(given.tasks):
            await operator.publish(subjects.tasks(MAIN_SOURCE), b"x" * 256)
        for _ in range(NUM_SAMPLES):
            await operator.publish(subjects.samples(MAIN_SOURCE), bytes(SAMPLE_BYTES))
        counts = Counts()
        assert server.pid is not None
        async with asyncio.TaskGroup() as asking:  # what fails ends the report too
            for _ in range(given.claimers):
                asking.create_task(_claim(producer, trainer, counts, given.pulls))
            await _report(server.pid, counts, given)
        for bus in (operator, producer, trainer):
            await bus.close()
    finally:
        server.stop()


async def _claim(producer: JetStreamBus, trainer: JetStreamBus, counts: Counts, pulls: int) -> None:
    """One claimer; the requests of `TaskQueue.claim` follow from whether it found something at once."""
    while counts.pulls < pulls:
        leases = await producer.claim(MAIN_SOURCE, max=4, wait_s=0.0)
        counts.pulls += 1
        if not leases:
            counts.waited += 1
            leases = await producer.claim(MAIN_SOURCE, max=1, wait_s=1.0)
            counts.pulls += 1
        counts.leases += len(leases)
        await trainer.fetch(SAMPLES, 1 + counts.reads % NUM_SAMPLES)
        counts.reads += 1
        for lease in leases:
            await lease.retry()


async def _report(pid: int, counts: Counts, given: argparse.Namespace) -> None:
    start_s = time.monotonic()
    seen: list[tuple[int, float]] = []
    while not seen or seen[-1][0] < given.pulls:
        await asyncio.sleep(0.05)
        if counts.pulls < min(len(seen) * given.every, given.pulls):
            continue
        seen.append((counts.pulls, _resident(pid)))
        line = {"seconds": round(time.monotonic() - start_s), **vars(counts), "rss_mib": round(seen[-1][1], 1)}
        print(json.dumps(line), flush=True)
    await asyncio.sleep(given.rest_s)
    half = np.array(seen[len(seen) // 2 :])
    slope = float(np.polyfit(half[:, 0], half[:, 1], 1)[0]) if len(half) > 1 else float("nan")
    last = {"rss_mib_after_rest": round(_resident(pid), 1), "mib_per_million_pulls": round(slope * 1e6, 2)}
    print(json.dumps(last), flush=True)


def _resident(pid: int) -> float:
    """MiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024 / MEBIBYTE


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text}")
    return number


def main() -> None:
    """Measure as the flags say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pulls", type=_positive, default=1_000_000)
    parser.add_argument("--every", type=_positive, default=50_000)
    parser.add_argument("--claimers", type=_positive, default=32)
    parser.add_argument("--tasks", type=_positive, default=64, help="in the queue; fewer than four a claimer, so that some wait")
    parser.add_argument("--rest-s", type=float, default=20.0, help="before the last look")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrl-soak-") as directory:
        asyncio.run(soak(given, Path(directory)))


if __name__ == "__main__":
    main()
