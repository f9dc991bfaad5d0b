"""The reward service of the recorded run `late`: `python -m tests.recorded.judge RUN_DIRECTORY` beside `streamrl up`."""

import asyncio
import sys
from contextlib import suppress

from streamrl.errors import BusError
from streamrl.producers.late import LateRewards
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.subjects import Subjects


async def judge(run: RunDir) -> None:
    """Reward what waits: some never, some twice, and each tenth task once more long after it was trained."""
    async with connected(run) as bus:
        rewards = LateRewards(bus, Subjects(run.name))
        async for _, sample in rewards.unrewarded():
            if sample.task % 7 != 3:
                await rewards.publish(sample.task, sample.rollout, float(sample.rollout), sample=0, parts={"index": float(sample.rollout)})
            if sample.task % 5 == 0:
                await rewards.publish(sample.task, sample.rollout, float(-sample.rollout), revision=2)
            if sample.task % 10 == 9:
                await rewards.publish(sample.task - 8, sample.rollout, 1.0, revision=3)


if __name__ == "__main__":
    with suppress(BusError):  # the run is over
        asyncio.run(judge(RunDir(sys.argv[1])))
