"""A run whose generation, reward and filters are functions written for slime; what they decided stands in its log."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from streamrl.runtime.rundir import RunDir
from tests.support.programs import STREAMRL, Start, said

TOML = """
[run]
name = "demo"
steps = 3
[data]
train = "train.jsonl"
heldout = "train.jsonl"
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
[evaluation]
num_problems = 1
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


@pytest.fixture
def place(hooks: Path) -> Path:
    """Has hooks, rows and `demo.toml`."""
    hooks.write_text(hooks.read_text() + LETTERS)
    (hooks.parent / "demo.toml").write_text(TOML)
    rows = [{"prompt": f"{a}+1=", "label": str(a + 1)} for a in range(4)]
    (hooks.parent / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return hooks.parent


async def test_a_run_of_slimes_hooks_is_replayed_without_them(place: Path, start: Start) -> None:
    hooks = place / "hooks.py"
    code, out, err = await said(await start(*STREAMRL, "up", "demo.toml", "--set", "page.enabled=false"))
    assert code == 0, out + err
    run = RunDir(place / "runs" / "demo")
    config = run.load_config()
    assert config.producer.function == f"slime:{hooks}:two_turns" and config.reward.kind == f"slime:{hooks}:letters"
    drops = json.loads((run.path / "summary.json").read_text())["drops"]
    assert set(drops) == {"filter: zero_std_0.0"}, "nothing failed, and groups were refused with the filter's reason"
    hooks.rename(place / "gone.txt")
    code, out, err = await said(await start(*STREAMRL, "replay", "demo"))
    assert code == 0, out + err
