"""A taskset of verifiers: three levers, of which one pays best, pulled three times.

It runs in the environment with verifiers and knows nothing of streamrl; `python -m verifiers.v1.cli.eval.main` could play it too.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

PAYS = {"a": 0.2, "b": 0.5, "c": 1.0}
PULLS = 3

__all__ = ["BanditEnv", "Bandits"]


class BanditData(vf.TaskData):
    pays: dict[str, float]
    """By lever."""


class BanditTask(vf.Task[BanditData, vf.State, vf.TaskConfig]):
    pass


class BanditConfig(vf.TasksetConfig):
    num_tasks: int = 16


class Bandits(vf.Taskset[BanditTask, BanditConfig]):
    def load(self) -> Iterator[BanditTask]:
        for number in range(self.config.num_tasks):
            yield BanditTask(BanditData(name=f"bandit#{number}", prompt=f"{number}: a, b or c?", pays=PAYS), self.config.task)


class BanditEnvConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class BanditEnv(vf.Env[BanditEnvConfig]):
    """Plays the user: what the model says is a lever, what it paid is the next message."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        paid: list[float] = []
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated:
                paid.append(task.data.pays.get(segment.last_reply, 0.0))
                if len(paid) == PULLS:
                    break
                segment = await interaction.turn(f"{paid[-1]:g}")
        interaction.trace.record_reward("paid", sum(paid) / PULLS)
