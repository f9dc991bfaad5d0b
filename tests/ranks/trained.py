"""A run with a trainer of two ranks in a directory of its own, started, disturbed and judged."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, cast

from streamrl.history.source import read_entries
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.ledger import LedgerEntry, TrainedOn
from tests.support.digits import TRANSFORMER
from tests.support.forked_up import forked_up, process_id
from tests.support.processes import alive, until
from tests.support.programs import STREAMRL, programs, said
from tests.support.world.shapes import NAME
from tests.support.world.verdict import judge

TOML = f"""{TRANSFORMER}
[run]
name = "demo"
steps = 12
numerics = "bitwise"
[data]
train = "train.jsonl"
heldout = "train.jsonl@[0:20]"
chat_template = false
max_prompt_tokens = 4
[tasks]
batch_tasks = 16
num_rollouts = 4
[warmup]
max_steps = 60
until = 0.5
learning_rate = 5e-3
[trainer]
ranks = 2
micro_tokens = 512
checkpoint_every = 4
rank_timeout_s = 90
[supervise]
backoff_s = 0.1
[page]
enabled = false
"""
LETTERS = """
def letters(task, episode):
    return float(sum(map(ord, episode.completion)) % 7)
"""
SHORT = ("warmup.max_steps=2", "data.heldout=", "tasks.drop_zero_variance=false", "reward.kind=reward.py:letters")
"""Settings of a run that need not learn: whatever it answers, groups have a spread, so every version is another."""
TENSOR = "trainer.backend=megatron trainer.tensor=2"
PIPELINE = "trainer.backend=megatron trainer.pipeline=2 model.layers=2"
SHARED = "trainer.backend=megatron trainer.context=2"


async def real_up(place: Path, *settings: str) -> tuple[int, str, str]:
    """As `forked_up`, whose workers are started as they are by the command line."""
    async with programs(place) as start:
        changed = (word for one in settings for word in ("--set", one))
        return await said(await start(*STREAMRL, "up", "run.toml", "--json", *changed), 500)


class Trained:
    """Such a run; one `up` of it at a time.

    Args:
        place: directory of the run file, which is written with its rows and a reward that tells answers apart.
        settings: of every `up`, words apart by spaces.
        by: what runs `up`.
    """

    def __init__(self, place: Path, *settings: str, by: Callable[..., Awaitable[tuple[int, str, str]]] = forked_up) -> None:
        rows = [{"prompt": f"{a}{b}", "label": str((b + 3) % 10)} for b in range(10) for a in range(10)]
        (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "run.toml").write_text(TOML)
        (place / "reward.py").write_text(LETTERS)
        self.place = place
        self.run = RunDir(place / "runs" / NAME)
        self._settings, self._by = settings, by
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def up(self, *settings: str) -> dict[str, Any]:
        """Run it to its end; its summary."""
        code, out, err = await self._by(self.place, *(word for one in (*self._settings, *settings) for word in one.split()))
        assert code == 0, err
        return json.loads(out)

    def begin(self, *settings: str) -> None:
        """Run it beside the test, which then waits for its `end`."""
        self._running = asyncio.create_task(self.up(*settings))

    async def end(self) -> dict[str, Any]:
        """The summary of what has begun."""
        assert self._running is not None
        return await self._running

    async def until(self, condition: Callable[[], object]) -> None:
        """Return once `condition` holds of what has begun, which must not have ended before."""
        running = self._running
        assert running is not None
        await until(lambda: running.done() or condition(), within_s=200)
        assert not running.done(), running.result()

    async def loses_a_rank(self, checkpoints: int = 1) -> dict[str, Any]:
        """Kill rank 1 once so many checkpoints are told of: rank 0 ends, too, both start again, and the run comes to its end.

        The audit finds nothing, and neither does a replay that starts both ranks by itself: equal digests, equal fingerprint.
        """
        leader = self.run.log_path("trainer-0")
        await self.until(lambda: leader.exists() and leader.read_text().count("checkpoint") >= checkpoints)
        ranks = [process_id(self.run, f"trainer-{rank}") for rank in range(2)]
        os.kill(ranks[1], signal.SIGKILL)
        await until(lambda: not alive(ranks[0]), within_s=120)
        summary = await self.end()
        events = self.run.events_path.read_text()
        # Of which rank the end is told is chance: the other one's comes a moment later.
        assert events.count("event=worker_restarted worker=trainer-") == 2 and "restart 1 of all 2 trainers" in events
        assert self.run.log_path("trainer-1").read_text().count("event=following rank=1") == 2
        generations = {line.rpartition("generation=")[2] for line in leader.read_text().splitlines() if "event=ranks_met" in line}
        assert len(generations) == 2
        await self.is_in_order(fences=2)
        return summary

    async def is_in_order(self, fences: int | None = None) -> None:
        """Audit it and replay its log; `fences`: how many trainers have begun."""
        verdict = await judge(self.run)
        assert verdict.problems == []
        assert fences in (None, verdict.counts["fences"])

    async def entries(self) -> list[LedgerEntry]:
        """Its ledger."""
        return (await read_entries(NAME, base=self.place / "runs"))[1]

    async def has_stretches(self, meshes: Sequence[TrainedOn], *, idle: int = 0) -> None:
        """Each mesh begins an epoch right behind the one before, and each stretch is replayed on its own; `idle` steps teach nothing."""
        entries = await self.entries()
        assert [entry.version.number for entry in entries] == list(range(1, len(entries) + 1))
        assert len({entry.digest for entry in entries}) == len(entries) - idle, "each has taught something"
        stretches = dict.fromkeys((entry.version.epoch, cast("TrainedOn", entry.trained_on)) for entry in entries)
        assert list(stretches) == list(enumerate(meshes))
        await self.is_in_order()
