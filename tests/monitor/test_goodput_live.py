"""Goodput of real runs adds up: the metrics agree with the streams, token by token, over the death of a producer."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.monitor.metrics_file import decoded, files
from streamrl.monitor.series import Row
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.ledger import LedgerEntry
from streamrl.schemas.subjects import SAMPLES, kind_of
from tests.support.harness import read_ledger
from tests.support.processes import until, worker_pid
from tests.support.programs import STREAMRL, Start, said

pytestmark = [pytest.mark.nats, pytest.mark.process]

NAME = "goodput"
NUM = 20
"""Batches before, and after, a producer is killed."""
TOML = f"""
[run]
name = "{NAME}"
steps = 1000000
[data]
train = "train.jsonl"
heldout = "train.jsonl"
chat_template = false
[sampling]
max_new_tokens = 64
[evaluation]
every = 10
[tasks]
batch_tasks = 3
num_rollouts = 2
max_staleness = 1
[engine]
kind = "table"
slots = 64
[trainer]
backend = "table"
[producer]
function = "code.py:of_many_lengths"
workers = 2
concurrency = 8
[debug]
token_delay_s = 0.005
[metrics]
window_s = 2
[supervise]
backoff_s = 0.5
"""
CODE = """
import random


async def of_many_lengths(task, engine):
    chat = engine.chat(task)
    await chat.generate(max_new_tokens=2 ** (task.index % 7))
    if task.index % 11 == 5:
        raise ValueError("what it was given is thrown away")
    return chat.episode(reward=float(random.random() < 0.5))
"""


def rows(run: RunDir, kind: str) -> list[Row]:
    found = [decoded(line) for path in files(run.metrics) for line in path.read_bytes().splitlines()]
    return [row for row in found if row is not None and row.kind == kind and not row.of]


def total(found: list[Row], name: str) -> float:
    return sum(row.values.get(name, 0.0) for row in found)


async def streams(run: RunDir) -> tuple[list[LedgerEntry], dict[int, dict[int, int]]]:
    """The ledger, and the sampled tokens of each rollout by the sequence of its message."""
    server = NatsServer(run.bus_store)
    server.start()
    try:
        bus = await connect(server.address, NAME, run.load_config().bus)
        entries = await read_ledger(bus, NAME)
        stored: dict[int, dict[int, int]] = {}
        state = await bus.state(SAMPLES)
        assert state.first == 1, "the whole stream is there"
        for sequence in range(1, state.last + 1):
            message = await bus.fetch(SAMPLES, sequence)
            if kind_of(message.subject) == "samples":
                batch = decode_samples(message.body)
                of = stored.setdefault(sequence, Counter())
                for row, rollout in enumerate(batch.rollouts.tolist()):
                    start, end = batch.offsets[row : row + 2].tolist()
                    of[rollout] += int(batch.loss_mask[start:end].sum())
        await bus.close()
    finally:
        server.stop()
    return entries, stored


@pytest.mark.parametrize(
    "killed", [pytest.param(False, marks=pytest.mark.soak), pytest.param(True, marks=pytest.mark.slow)], ids=["drained", "killed"]
)
async def test_sampled_tokens_are_published_or_cut_and_those_trained_dropped_or_waiting(start: Start, tmp_path: Path, killed: bool) -> None:
    (tmp_path / "goodput.toml").write_text(TOML)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{a}+1=", "label": str(a + 1)}) + "\n" for a in range(8)))
    run = RunDir(tmp_path / "runs" / NAME)
    process = await start(*STREAMRL, "up", "goodput.toml", "--plain")
    await until(lambda: run.metrics.exists() and len(rows(run, "batch")) > NUM, within_s=180)
    if killed:
        pid = worker_pid(run, "producer", 1)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        before = len(rows(run, "batch"))
        await until(lambda: worker_pid(run, "producer", 1) not in (None, pid), within_s=90)
        await until(lambda: len(rows(run, "batch")) > before + NUM, within_s=180)
    process.send_signal(signal.SIGINT)
    code, out, err = await said(process)
    assert (code, err) == (0, ""), out

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
