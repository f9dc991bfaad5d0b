"""A run that learns nothing and never pauses: the table backend, four sums, a reward of letters."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from streamrl.runtime.rundir import RunDir
from tests.support.memory import freed_after_test

ROOT = Path(__file__).parents[2]
TOML = """
[run]
name = "demo"
steps = {steps}
[data]
train = "train.jsonl"
[sampling]
max_new_tokens = 4
[tasks]
batch_tasks = 4
num_rollouts = 2
drop_zero_variance = false
[warmup]
max_steps = 2
[reward]
kind = "reward.py:letters"
[producer]
concurrency = 8
{producer}
[engine]
kind = "table"
{engine}
[trainer]
backend = "table"
checkpoint_every = {checkpoint_every}
[supervise]
drain_s = 10
backoff_s = 0.1
"""


def write_run(place: Path, *, steps: int, engine: str = "", producer: str = "", rest: str = "", checkpoint_every: int = 20) -> Path:
    rows = [{"prompt": f"{a}+{a}=", "label": str(a + a)} for a in range(4)]
    (place / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "reward.py").write_text("def letters(task, episode):\n    return sum(c.isalpha() for c in episode.completion) / 4\n")
    toml = place / "demo.toml"
    toml.write_text(TOML.format(steps=steps, engine=engine, producer=producer, checkpoint_every=checkpoint_every) + rest)
    return toml


@asynccontextmanager
async def started(
    command: Sequence[str], place: Path, *, prefix: Sequence[str] = (), surroundings: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m streamrl COMMAND` in `place`, killed at the end if it still runs; its output goes to `out` there."""
    with (place / "out").open("ab") as out:
        process = await asyncio.create_subprocess_exec(
            *prefix,
            sys.executable,
            "-m",
            "streamrl",
            *command,
            cwd=place,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), **(surroundings or {})},
            stdout=out,
            stderr=out,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        run = RunDir(place / "runs" / "demo")
        if run.exists:
            freed_after_test(run.load_config(), run)


async def until(holds: Callable[[], object], process: asyncio.subprocess.Process, place: Path, *, within_s: float = 90.0) -> None:
    """Return once `holds()`; fails when the process ends before, or after a time that no healthy machine needs."""
    async with asyncio.timeout(within_s):
        while not holds():
            assert process.returncode is None, (place / "out").read_text()
            await asyncio.sleep(0.1)


def trained(place: Path) -> int:
    """Number of the newest version that a checkpoint has."""
    names = [path.name for path in (place / "runs" / "demo" / "checkpoints").glob("main-v*")]
    return max((int(name.split("-")[1][1:]) for name in names if not name.endswith(".partial")), default=0)
