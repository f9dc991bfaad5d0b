"""User code that tests run in children: a folder with one file, whose functions tell of themselves in files beside it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from streamrl.engines.protocol import Engine
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Scoring
from streamrl.producers.children.jobs import NOTHING, Keeping
from streamrl.producers.children.pool import Children
from streamrl.producers.groups import Group, GroupRunner
from streamrl.rewards.built_in import ExactMatch
from streamrl.schemas.tasks import RolloutTask, Sampling
from tests.support.policies import make_model

CODE = """
import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from streamrl import Episode, Failure

FOLDER = Path(__file__).parent


def me(task, engine):
    return task.index, engine.context.rollout_index


def tell(name, text=""):
    with (FOLDER / name).open("a") as file:
        file.write(f"{os.getpid()} {text}\\n")


async def good(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    return chat.episode()

"""


class Workshop:
    """Children of this process that run `CODE` and what a test adds, with an engine of this process.

    Args:
        folder: for the code and the model.
        engine: what rollouts ask.
    """

    def __init__(self, folder: Path, engine: Engine) -> None:
        self.folder = folder
        self.engine = engine
        self.tokenizer = make_model(folder / "model")

    def task(self, index: int = 0, num_rollouts: int = 3, **fields: Any) -> RolloutTask:
        """A task whose label is what the scripted engine answers."""
        return RolloutTask(
            run="run",
            index=index,
            source="main",
            prompt_ids=tuple(self.tokenizer.encode("<|user|>3+4<|end|><|assistant|>")),
            prompt="3+4",
            label="7",
            num_rollouts=num_rollouts,
            sampling=Sampling(max_new_tokens=4),
            seed=index,
            **fields,
        )

    @contextlib.asynccontextmanager
    async def runner(
        self,
        code: str,
        *,
        producer: str = "",
        reward: str = "",
        limits: Limits | None = None,
        count: int = 1,
        scoring: Scoring | None = None,
        max_deaths: int = 4,
        **hello: Any,
    ) -> AsyncIterator[GroupRunner]:
        """A started runner; a producer or reward that is not named is the built-in one, in this process."""
        path = self.folder / "code.py"
        path.write_text(CODE + code)
        from streamrl.producers.single_turn import SingleTurn

        told = Hello(
            function=f"{path}:{producer}" if producer else "",
            function_key="producer.function",
            reward=f"{path}:{reward}" if reward else "",
            model_dir=str(self.folder / "model"),
            max_len=128,
            chat_template=True,
            memory_bytes=0,
        )
        limits = limits or Limits(idle_s=20.0, total_s=60.0)
        children = Children(replace(told, **hello), limits, count=count, scoring=scoring or Scoring(timeout_s=20.0))
        runner = GroupRunner(
            producer=None if producer else SingleTurn(),
            reward=None if reward else ExactMatch(),
            engine=self.engine,
            tokenizer=self.tokenizer,
            options={},
            max_len=128,
            chat_template=True,
            children=children,
            max_deaths=max_deaths,
        )
        try:
            await runner.start()
            yield runner
        finally:
            await runner.close()

    async def run(self, runner: GroupRunner, *tasks: RolloutTask, keeping: Keeping = NOTHING) -> list[Group]:
        """The groups of tasks that are worked on at the same time."""
        return list(await asyncio.gather(*(runner.run(task, keeping=keeping) for task in tasks)))

    async def played(self, code: str, *tasks: RolloutTask, keeping: Keeping = NOTHING, **options: Any) -> list[Group]:
        """The groups of tasks under a runner of their own."""
        async with self.runner(code, **options) as runner:
            return await self.run(runner, *tasks, keeping=keeping)

    def told(self, name: str) -> list[list[str]]:
        """The lines that user code wrote with `tell`, as words."""
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def ends(group: Group) -> dict[int, str]:
    """What became of each rollout: `episode`, or the reason and detail of its failure."""
    return {episode.rollout: "episode" for episode in group.episodes} | {f.rollout: f"{f.reason}: {f.detail}" for f in group.failures}
