"""Samples beyond model.max_len, and those that a length limit truncated, in whole runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from streamrl.bus.memory import MemoryBus
from streamrl.bus.protocol import Bus
from streamrl.history.dead_letters import DeadLetters
from streamrl.history.replay import verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from streamrl.schemas.encoding import encode_samples
from streamrl.schemas.samples import Sample, VersionSpan
from streamrl.schemas.subjects import HEADER_TASK, Subjects
from streamrl.schemas.versions import Version
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.rows import sample
from tests.support.world.world import table_config

pytestmark = pytest.mark.whole

RANDOM: dict[str, dict[str, object]] = {"reward": {"kind": "random"}}
"""Rewards that need no processes."""


def long_sample(run: str, rollout: int, length: int) -> Sample:
    mask = np.arange(length, dtype=np.int64).clip(0, 1).astype(np.uint8)
    spans = (VersionSpan(1, None), VersionSpan(length - 1, Version(0, 0)))
    tokens, logprobs = np.full(length, 5, np.int32), mask * np.float32(-0.5)
    return sample(rollout, run=run, task=0, group_size=3, tokens=tokens, loss_mask=mask, logprobs=logprobs, spans=spans)


async def test_a_sample_beyond_the_longest_sequence_is_not_trained(tmp_path: Path, bus: Bus, run_id: str) -> None:
    length = 12_000
    run, config = make_run(tmp_path, table_config(tmp_path, run={"name": run_id, "steps": 2}, **RANDOM))
    await write_or_check(bus, await prepare(config, run))
    body = encode_samples([long_sample(run_id, 0, length), long_sample(run_id, 1, 9), long_sample(run_id, 2, 9)])
    await bus.publish(Subjects(run_id).samples("main"), body, headers={HEADER_TASK: "0"})
    await run_to_end(config, run, bus)
    entries = await read_ledger(bus, run_id)
    poison = [drop for entry in entries for drop in entry.drops if drop.reason == "poison"]
    assert [(drop.sequence, drop.task, drop.retires) for drop in poison] == [(1, 0, True)]
    assert f"got one of {length}" in poison[0].detail
    assert not any(1 in group.sequences for entry in entries for group in entry.used)
    (letter,) = [letter async for letter in DeadLetters(bus, Subjects(run_id)).letters()]
    assert (letter.sequence, letter.body) == (1, body)
    assert (await verify(config, bus, run.model_dir)).ok


@pytest.mark.parametrize("overlong", ["train", "mask", "drop"])
async def test_truncated_samples_are_trained_masked_or_dropped(tmp_path: Path, overlong: str) -> None:
    """Completions of 5 tokens at most, of which an untrained policy ends few by itself."""
    tasks = {"overlong": overlong, "drop_zero_variance": False, "batch_tasks": 8, "num_rollouts": 8}
    run, config = make_run(tmp_path, table_config(tmp_path, run={"steps": 2}, tasks=tasks, sampling={"top_k": 24}, **RANDOM))
    bus = MemoryBus(config.run.name, config.bus)
    await write_or_check(bus, await prepare(config, run))
    await run_to_end(config, run, bus)
    entries = await read_ledger(bus, config.run.name)
    ratios = [entry.metrics["rollout/truncated_ratio"] for entry in entries]
    dropped = sum(entry.dropped["truncated"] for entry in entries)
    if overlong == "drop":
        assert max(ratios) == 0 and dropped > 0
    else:
        assert min(ratios) > 0 and dropped == 0
    completions = sum(len(group.rollouts) for entry in entries for group in entry.used)
    trained = sum(entry.metrics["rollout/tokens_trained"] for entry in entries)
    assert (trained < 5 * completions * (1 - np.mean(ratios))) == (overlong != "train")
    assert (await verify(config, bus, run.model_dir)).ok
    await bus.close()
