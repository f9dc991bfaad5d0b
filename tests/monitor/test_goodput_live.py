"""Goodput, shares of time and lengths of real runs: the metrics agree with the streams, over the deaths of workers."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus, Message
from streamrl.monitor.series import Row
from streamrl.monitor.shares import SILENT_S, named
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import SAMPLES, kind_of
from streamrl.telemetry.clock import REPORT_EVERY_S
from streamrl.telemetry.states import STATES, share
from tests.support.buses import bus_of
from tests.support.digits import TABLE, write_digits
from tests.support.harness import read_ledger
from tests.support.looked_at import sets
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, said
from tests.support.runs import rows_of

pytestmark = pytest.mark.process

NUM = 20
"""Batches before, and after, a producer is killed."""
ENDLESS = ("run.steps=1000000", "warmup.max_steps=0")
OF_MANY_LENGTHS = (
    *("sampling.max_new_tokens=64", "evaluation.every=10", "tasks.batch_tasks=3", "tasks.num_rollouts=2", "tasks.max_staleness=1"),
    *("engine.slots=64", "producer.function=mine.py:of_many_lengths", "producer.workers=2", "producer.concurrency=8"),
    *("debug.token_delay_s=0.005", "metrics.window_s=2", "supervise.backoff_s=0.5"),
)
TIMED = (
    *("sampling.max_new_tokens=4", "tasks.batch_tasks=4", "tasks.num_rollouts=2", "tasks.drop_zero_variance=false", "data.heldout="),
    *("producer.function=mine.py:with_a_tool", "reward.kind=mine.py:one", "debug.token_delay_s=0.05", "metrics.window_s=4"),
    "supervise.backoff_s=3.0",
)
CODE = """
import asyncio
import random


async def of_many_lengths(task, engine):
    chat = engine.chat(task)
    await chat.generate(max_new_tokens=2 ** (task.index % 7))
    if task.index % 11 == 5:
        raise ValueError("what it was given is thrown away")
    return chat.episode(reward=float(random.random() < 0.5))


async def with_a_tool(task, engine):
    chat = engine.chat(task)
    await chat.generate()
    await asyncio.sleep(0.1)
    return chat.episode()


async def one(task, episode):
    await asyncio.sleep(0.05)
    return 1.0
"""


async def begun(start: Start, place: Path, *keys: str) -> tuple[RunDir, asyncio.subprocess.Process]:
    write_digits(place, TABLE)
    (place / "mine.py").write_text(CODE)
    return RunDir(place / "runs" / "digits"), await start(*STREAMRL, "up", "run.toml", "--plain", *sets(*ENDLESS, *keys))


async def end(process: asyncio.subprocess.Process) -> None:
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, ""), out


def kill(run: RunDir, kind: str, index: int = 0) -> int:
    pid = worker_pid(run, kind, index)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


def rows(run: RunDir, kind: str, of: str = "") -> list[Row]:
    return [row for row in rows_of(run, kind) if row.of == of]


def total(found: list[Row], name: str) -> float:
    return sum(row.values.get(name, 0.0) for row in found)


async def messages(bus: Bus, stream: str) -> AsyncGenerator[Message]:
    state = await bus.state(stream)
    for sequence in range(state.first, state.last + 1):
        yield await bus.fetch(stream, sequence)


def sampled_tokens(message: Message) -> dict[int, int]:
    """Count the sampled tokens of each rollout; a message without samples has none."""
    found = Counter[int]()
    if kind_of(message.subject) == "samples":
        batch = decode_samples(message.body)
        for row, rollout in enumerate(batch.rollouts.tolist()):
            start, end = batch.offsets[row : row + 2].tolist()
            found[rollout] += int(batch.loss_mask[start:end].sum())
    return found


async def streams(run: RunDir) -> tuple[list[LedgerEntry], dict[int, dict[int, int]]]:
    """The ledger, and the sampled tokens of each rollout by the sequence of its message."""
    async with bus_of(run) as bus:
        assert (await bus.state(SAMPLES)).first == 1, "the whole stream is there"
        stored = {message.sequence: of async for message in messages(bus, SAMPLES) if (of := sampled_tokens(message))}
        return await read_ledger(bus, run.name), stored


@pytest.mark.nats
@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.soak), pytest.param(True, marks=pytest.mark.slow)], ids=["drained", "killed"]
)
async def test_sampled_tokens_are_published_or_cut_and_those_trained_dropped_or_waiting(start: Start, tmp_path: Path, killed: bool) -> None:
    run, process = await begun(start, tmp_path, *OF_MANY_LENGTHS)
    await until(lambda: run.metrics.exists() and len(rows(run, "batch")) > NUM, within_s=180)
    if killed:
        pid = kill(run, "producer", 1)
        before = len(rows(run, "batch"))
        await until(lambda: worker_pid(run, "producer", 1) not in (None, pid), within_s=90)
        await until(lambda: len(rows(run, "batch")) > before + NUM, within_s=180)
    await end(process)
    entries, stored = await streams(run)
    lag = rows(run, "window")[-1].values
    behind = sum(sum(of.values()) for sequence, of in stored.items() if sequence > entries[-1].cursor)
    exact = behind + rows(run, "batch")[-1].values["tokens/waiting"]
    # A message behind the cursor counts as long as those of the last batches: they are of 2 to 128 tokens.
    assert abs(lag["lag/stream_tokens"] - exact) <= 128 * lag["lag/stream_messages"]
    assert lag["lag/stream_messages"] or lag["lag/stream_tokens"] == exact
    batches, windows = rows(run, "batch"), rows(run, "window")
    assert [row.version for row in batches] == [str(entry.version) for entry in entries]

    def tokens(sequence: int, rollouts: tuple[int, ...]) -> int:
        return sum(stored[sequence][rollout] for rollout in rollouts)

    taken = sum(sum(of.values()) for sequence, of in stored.items() if sequence <= entries[-1].cursor)
    dropped = Counter[str]()
    for entry in entries:
        for drop in entry.drops:
            if drop.sequence in stored:
                dropped[drop.reason] += tokens(drop.sequence, drop.rollouts)
    trained = sum(
        tokens(sequence, (rollout,))
        for entry in entries
        for group in entry.used
        for sequence, rollout in zip(group.sequences, group.rollouts, strict=True)
    )
    # What the metrics say is what the streams say.
    assert total(batches, "tokens/stored_total") == taken
    assert total(batches, "tokens/trained_total") + total(batches, "tokens/masked_total") == trained
    told = {name.rpartition("/")[2]: 0 for row in batches for name in row.values if name.startswith("tokens/dropped_total/")}
    assert {reason: total(batches, f"tokens/dropped_total/{reason}") for reason in told} == +dropped
    assert {"stale", "zero_variance"} <= (+dropped).keys()
    # And it adds up.
    assert taken == trained + dropped.total() + batches[-1].values["tokens/waiting"]
    published = total(windows, "tokens/published_total")
    everything = sum(sum(of.values()) for of in stored.values())
    sampled, cut, evaluated = (total(windows, f"tokens/{name}_total") for name in ("sampled", "cut", "evaluated"))
    left = windows[-1].values["tokens/open"]
    assert sampled == published + cut + evaluated + left
    assert cut > 0 and evaluated > 0
    if killed:
        # It took with it what it had in hand and what it had not reported, and nothing else is missing.
        assert 0 <= everything - published <= left
    else:
        assert (published, left) == (everything, 0)


@pytest.mark.nats
@pytest.mark.slow
async def test_shares_add_up_to_one_in_every_window_over_the_deaths_of_engine_and_trainer(start: Start, tmp_path: Path) -> None:
    run, process = await begun(start, tmp_path, *TIMED)

    def seen(of: str, name: str) -> bool:
        return any(row.values.get(name, 0.0) > 0.0 for row in rows(run, "window", of))

    await until(lambda: seen("trainer-0", share("trainer", "compute")) and seen("producer-0", share("producer", "tools")), within_s=180)
    for worker, kind in (("engine-0", "engine"), ("trainer-0", "trainer")):
        kill(run, kind)
        await until(lambda worker=worker, kind=kind: seen(worker, share(kind, "down")), within_s=120)
        gone = len(rows(run, "window", worker))
        await until(lambda worker=worker, gone=gone: len(rows(run, "window", worker)) > gone + 1, within_s=120)
    await end(process)
    moved: set[str] = set()
    for worker, kind in (("engine-0", "engine"), ("trainer-0", "trainer"), ("producer-0", "producer"), *(("", kind) for kind in STATES)):
        found = [row for row in rows(run, "window", worker) if any(name in row.values for name in named(kind))]
        assert len(found) >= 4
        for row in found:
            parts = {name: value for name, value in row.values.items() if name.startswith(f"{kind}/share/")}
            assert sum(parts.values()) == pytest.approx(1.0, abs=0.01)
            moved |= {name for name, value in parts.items() if value > 0.0}
        if worker:
            # What was reported is the time that has passed, no more and no less, but for what is on its way at both ends. The last row has
            # the time of the drain too, in which workers have ended.
            slots = max(row.values.get("producer/slots", 1.0) for row in found)
            inner = found[1:-1]
            spent_s = sum(row.values.get(name, 0.0) for row in inner for name in named(kind)) / slots
            passed_s = inner[-1].time_s - found[0].time_s
            assert abs(spent_s - passed_s) < SILENT_S + REPORT_EVERY_S, (worker, spent_s, passed_s)
    assert moved >= {share("trainer", state) for state in ("setup", "compute", "wait_samples", "wait_bus", "publish", "down")}
    assert moved >= {share("engine", state) for state in ("setup", "decode", "down")}
    assert moved >= {share("producer", state) for state in ("generate", "tools", "reward", "publish", "wait_engine")}
    assert seen("", "starvation/trainer")
