"""A game of TextArena that downloads nothing, by verifiers' own environment for such games."""

from __future__ import annotations

import random
from collections.abc import Iterator

import textarena as ta
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena import TextArenaData, TextArenaEnv, TextArenaTask

GAME = "GuessTheNumber-v0"
__all__ = ["Guessing", "TextArenaEnv"]


class Guessing(vf.Taskset[TextArenaTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self) -> Iterator[TextArenaTask]:
        number = 0
        while True:
            random.seed(number)
            env = ta.make(env_id=GAME)
            env.reset(num_players=1)
            board = str(env.get_observation()[1])
            yield TextArenaTask(
                TextArenaData(name=f"{GAME}#{number}", prompt=board, system_prompt="Play.", info={"game": GAME, "seed": number}),
                self.config.task,
            )
            number += 1
