"""A run whose generation, reward and filters are functions written for slime; what they decided stands in its log."""

import json
import shutil
from pathlib import Path

import pytest

from streamrl.bus.protocol import Bus
from streamrl.config.load import load
from streamrl.history.replay import verify
from streamrl.launch.prepare import prepare
from streamrl.runtime.run_record import write_or_check
from tests.support.harness import make_run, read_ledger, run_to_end

TOML = """
[run]
name = "demo"
steps = 3
[data]
train = "train.jsonl"
max_prompt_tokens = 16
[model]
max_len = 64
[sampling]
max_new_tokens = 2
[tasks]
batch_tasks = 2
num_rollouts = 4
max_staleness = 0
drop_zero_variance = false
[slime]
custom_generate_function_path = "hooks.py:two_turns"
custom_rm_path = "hooks.py:letters"
dynamic_sampling_filter_path = "hooks.py:spread"
rollout_sample_hook_path = ["hooks.py:shout"]
custom_config = { wanted = "A" }
[engine]
kind = "table"
[trainer]
backend = "table"
"""
LETTERS = '''

async def letters(args, sample, **kwargs):
    """Of what the sample hook has made upper case."""
    assert sample.metadata["hooked"] and sample.prompt.startswith("<|user|>") and sum(sample.loss_mask) < sample.response_length
    assert sample.metadata["evaluation"] in (True, False) and (args.rollout_batch_size, args.n_samples_per_prompt) == (2, 4)
    if sample.label in "13":  # groups of one reward, which the filter refuses
        return 0.0
    return 0.1 * (sample.index % 4) + float(sum(letter >= args.wanted for letter in sample.response)) / len(sample.response)
'''


pytestmark = pytest.mark.nats


@pytest.fixture
def place(hooks: Path, run_id: str) -> Path:
    """Has hooks, rows and `demo.toml`."""
    hooks.write_text(hooks.read_text() + LETTERS)
    (hooks.parent / "demo.toml").write_text(TOML.replace("demo", run_id))
    rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(4)]
    (hooks.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return hooks.parent


async def test_a_run_of_slimes_hooks_is_replayed_without_them(place: Path, nats_bus: Bus, run_id: str) -> None:
    run, config = make_run(place, load(place / "demo.toml"))
    hooks = place / "hooks.py"
    assert config.producer.function == f"slime:{hooks}:two_turns" and config.reward.kind == f"slime:{hooks}:letters"
    await write_or_check(nats_bus, await prepare(config, run))
    await run_to_end(config, run, nats_bus)
    reasons = {drop.reason for entry in await read_ledger(nats_bus, run_id) for drop in entry.drops}
    assert reasons == {"filter: zero_std_0.0"}, "nothing failed, and groups were refused with the filter's reason"
    shutil.move(hooks, place / "gone.txt")
    replay = await verify(config, nats_bus, run.model_dir)
    assert replay.ok and replay.versions == 3, replay.lines
