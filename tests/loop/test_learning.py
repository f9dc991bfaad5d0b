"""It learns, and from the rewards: held-out accuracy recomputed with transformers from the saved model directories."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamrl.config.load import load
from tests.support.harness import run_to_end
from tests.support.ups import begun

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"

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


def heldout(model_dir: Path) -> tuple[float, float]:
    """Share of the held-out problems that transformers' own greedy generation gets right; mean probability of their answers."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (QUICKSTART / "heldout.jsonl").read_text().splitlines()]
    right, probability = 0, 0.0
    for row in rows:
        messages = [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        answer = torch.tensor([[*tokenizer(row["label"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
            logprobs = model(torch.cat([ids, answer], 1)).logits[0, ids.shape[1] - 1 : -1].log_softmax(-1)
        right += tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip() == row["label"]
        probability += float(logprobs.gather(1, answer.T).sum().exp())
    return right / len(rows), probability / len(rows)


async def train(tmp_path: Path, steps: int, *settings: str) -> list[tuple[float, float]]:
    """Run so many batches of the quickstart in lockstep; `heldout` after the warm-up and at the end."""
    fixed = (f"run.steps={steps}", "run.until_reward=0", "run.max_seconds=0", "tasks.max_staleness=0", f"run.seed={SEED}")
    async with begun(tmp_path, load(QUICKSTART / "quickstart.toml", overrides=[*fixed, *settings])) as (run, config, bus):
        await run_to_end(config, run, bus, timeout_s=800)
        saved = sorted(run.hf.iterdir())
    assert len(saved) == 2, f"expected the policy after the warm-up and at the end, got {saved}"
    return [heldout(one) for one in saved]


# In lockstep the seed decides what is learned. (One version behind, the clock decides which rollouts meet which version, and so did
# chance.) Two runs of seed 1 and two of seed 2, beside other work, had equal accuracies, and probabilities that differed by 1e-4 at
# most: the bound is farther from the right rewards' rises than five problems of 72, or 1000 times that spread. The tests take the seed with
# the wider margin. Measured:
#
#     rewards     seed   accuracy          probability
#     right       1      0.278 -> 0.556    0.188 -> 0.498
#     right       2      0.292 -> 0.944    0.236 -> 0.787
#     shuffled    1      0.278 -> 0.014    0.188 -> 0.019
#     shuffled    2      0.292 -> 0.014    0.236 -> 0.013
#
# 24 batches of shuffled rewards of seed 2 give 0.292 -> 0.042 and 0.236 -> 0.040 already; the test takes 16.
SEED = 2
RISE = 0.2


@pytest.mark.process
@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_rewards_teach(tmp_path: Path) -> None:
    """Asynchronously it learns in the quickstart: .ci/quickstart holds `make up` to the same rise."""
    (first, likely_first), (last, likely_last) = await train(tmp_path, 80)
    assert last >= first + RISE, f"held-out accuracy {first:.3f} -> {last:.3f}"
    assert likely_last >= likely_first + RISE, f"probability of held-out answers {likely_first:.3f} -> {likely_last:.3f}"


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    """The same rewards, given to any of a group's rollouts."""
    (tmp_path / "shuffled.py").write_text(SHUFFLED)
    (first, likely_first), (last, likely_last) = await train(tmp_path, 16, f"reward.kind={tmp_path / 'shuffled.py'}:Shuffled")
    assert last < first, f"held-out accuracy {first:.3f} -> {last:.3f} from rewards that say nothing"
    assert likely_last < likely_first, f"probability of held-out answers {likely_first:.3f} -> {likely_last:.3f} from such rewards"
