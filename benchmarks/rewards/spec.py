"""What `bench rewards` runs: many graders that sleep, over the pool alone; and the quickstart with a grader of which a few calls hang."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace

from benchmarks.loop.ways import LoopSpec, quickstart
from streamrl.config.tree import Config, RewardConfig
from streamrl.errors import ConfigError

POOL, LOOP = "pool", "quickstart"
"""The two parts."""
PLAIN, ASYNC = "def, time.sleep", "async def, asyncio.sleep"
UNDISTURBED, HUNG = "nothing hangs", "some graders hang"
CODE = '''
import asyncio
import random
import time


def sleeps(task, episode, seconds):
    """A grader that blocks."""
    time.sleep(seconds)
    return 1.0


async def waits(task, episode, seconds):
    """A grader that waits without blocking."""
    await asyncio.sleep(seconds)
    return 1.0


def matches(task, episode, hung):
    """The quickstart's exact match; in a fixed choice of rollouts it never answers."""
    if random.Random(f"{task.index}.{episode.rollout}").random() < hung:
        time.sleep(86400)
    return float(episode.completion.strip() == str(task.label))
'''
"""The user's code."""


class RewardsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    rounds: int = 3
    """Of both parts."""
    graders: int = 512
    """Calls of the first part."""
    sleep_s: float = 0.05
    """Of each."""
    children: int = 8
    """Grader processes there."""
    group: int = 8
    """Rollouts of a task there."""
    batches: int = 120
    """Trained in every run of the second part."""
    skip: int = 30
    """The first of them, which are not measured: what hangs is told from what is slow only once some graders have ended."""
    hung: float = 0.01
    """Share of graders that hang there."""
    backend: str = "torch"
    """`torch`: the quickstart's model and trainer; `table`: without torch, to try it out."""

    def __post_init__(self) -> None:
        if not (0 < self.skip < self.batches and self.rounds > 0 and 0 <= self.hung < 1 and self.graders % self.group == 0):
            raise ConfigError(
                f"expected rounds, some batches left out at the start, a share below 1 and whole groups of {self.group}, got "
                f"{self.rounds} rounds, {self.skip} of {self.batches} batches, {self.hung:g} and {self.graders} graders",
                hint="for example --rounds 1 --batches 20 --skip 5",
            )


def config_of(spec: RewardsSpec, directory: Path, *, name: str, hung: float) -> Config:
    """The quickstart with a grader of its own, all limits as they come.

    Args:
        spec: of the benchmark.
        directory: holds the problems, the user's code and the runs.
        name: of the run.
        hung: share of graders that hang.
    """
    loop = LoopSpec(batches=spec.batches, skip=spec.skip, backend=spec.backend)
    config = quickstart(loop, directory, name=name)
    return replace(config, reward=RewardConfig(kind=f"{directory / 'code.py'}:matches", options={"hung": hung}))
