"""It learns, and from the rewards: held-out accuracy recomputed with transformers from the saved model directories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"

SHUFFLED = """
import random


class Shuffled:
    def __init__(self):
        self.random = random.Random(0)

    async def score(self, task, episodes):
        from streamrl.rewards.built_in import ExactMatch

        values = list(await ExactMatch().score(task, episodes))
        self.random.shuffle(values)
        return values
"""


def heldout_accuracy(model_dir: Path) -> float:
    """Share of the held-out problems that transformers' own greedy generation gets right."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (QUICKSTART / "heldout.jsonl").read_text().splitlines()]
    right = 0
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
        right += tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip() == row["label"]
    return right / len(rows)


def train(tmp_path: Path, steps: int, *settings: str) -> tuple[float, float]:
    """Run the quickstart for a while; held-out accuracy after the warm-up and at the end."""
    fixed = (f"run.dir={tmp_path}", f"run.steps={steps}", "run.until_reward=0", "run.max_seconds=0")
    command = [sys.executable, "-m", "streamrl", "up", str(QUICKSTART / "quickstart.toml"), "--plain"]
    for setting in (*fixed, *settings):
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    saved = sorted((tmp_path / "quickstart" / "hf").iterdir())
    assert len(saved) == 2, f"expected the policy after the warm-up and at the end, got {saved}"
    return heldout_accuracy(saved[0]), heldout_accuracy(saved[1])


@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("seed", [1, 2])
def test_heldout_accuracy_rises(tmp_path: Path, seed: int) -> None:
    """Seed 0 is what `make up` runs, and .ci/run holds it to the same rise."""
    first, last = train(tmp_path, 80, f"run.seed={seed}")
    assert last >= first + 0.2, f"held-out accuracy {first:.3f} -> {last:.3f}"


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    first, last = train(tmp_path, 40, f"reward.kind={tmp_path / 'shuffled.py'}:Shuffled")
    assert last < first + 0.1, f"held-out accuracy {first:.3f} -> {last:.3f} from rewards that say nothing"
