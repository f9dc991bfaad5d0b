"""Run TRL's GRPOTrainer on the rows of examples/smollm2, with the same model, answers a row, batch, rate and number of steps.

Usage: python -m benchmarks.peers.trl_grpo FOLDER OUT.csv [--steps 110] [--seed 1] [--attention eager] [--float32] [--seconds 500]

FOLDER holds the model and the rows that examples/smollm2/prepare.py writes. OUT.csv gets a line for each batch and for each evaluation of
all held-out rows (greedy), in the columns of examples/smollm2/curve.py; seconds count from this program's start. Generation is that of
transformers, one padded batch in the trainer's process; vLLM pins another torch and is not used. It needs `pip install trl`.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tempfile
import time
from pathlib import Path
from typing import Any

from streamrl.rewards.numbers import final_answer

BEGAN = time.time()
MODEL = "SmolLM2-135M-Instruct"
EVERY = 20
BATCH_TASKS, NUM_ROLLOUTS, MAX_NEW_TOKENS, TEMPERATURE, LEARNING_RATE, WARMUP = 32, 16, 24, 0.8, 2e-5, 5
"""The values of examples/smollm2/gpu.toml."""


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read rows in TRL's form: chat messages, and the label in a column of its own."""
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [{"prompt": [{"role": "user", "content": row["prompt"]}], "label": row["label"]} for row in found]


def grade(text: str, label: str) -> float:
    """Grade as `reward.kind = "gsm8k"` does: 1 where the last number is the label."""
    found, expected = final_answer(text), final_answer(label)
    return float(found is not None and expected is not None and found.value == expected.value)


class Curve:
    """Collects a line for each batch and each evaluation, and writes them as it goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[dict[str, Any]] = []

    def add(self, step: int, *, reward: float | str = "", heldout: float | str = "", rollouts: int = 0) -> None:
        """Add a line; the seconds are those since the program began."""
        names = {"seconds": round(time.time() - BEGAN, 1), "version": f"0.{step}", "reward": reward, "heldout": heldout}
        self._rows.append({**names, "rollouts": rollouts, "tokens_made": ""})
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self._rows[0]))
            writer.writeheader()
            writer.writerows(self._rows)
        if heldout != "":
            print(f"[{names['seconds']:.0f} s] step {step} held-out {heldout:.3f}", flush=True)


def evaluate(model: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> float:
    """Give the share of rows whose greedy answer is right."""
    import torch

    texts = [tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True) for row in rows]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False).to(model.device)
    was_training = model.training
    model.eval()
    with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16):
        ids = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False, pad_token_id=tokenizer.pad_token_id, use_cache=True)
    model.train(was_training)
    answers = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return sum(grade(text, row["label"]) for text, row in zip(answers, rows, strict=True)) / len(rows)


def main() -> None:
    """Read the arguments and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=BATCH_TASKS)
    parser.add_argument("--attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--float32", action="store_true", help="no autocast to bfloat16")
    parser.add_argument("--seconds", type=float, default=500)
    arguments = parser.parse_args()

    import torch
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(arguments.folder / MODEL, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(arguments.folder / MODEL, dtype=torch.float32, attn_implementation=arguments.attention)
    heldout = read_rows(arguments.folder / "sums-heldout.jsonl")
    curve, samples = Curve(arguments.out), arguments.tasks * NUM_ROLLOUTS

    def reward(completions: list[Any], label: list[str], **_: Any) -> list[float | None]:
        return [grade(one[0]["content"], expected) for one, expected in zip(completions, label, strict=True)]

    class Watch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
            if logs and "reward" in logs:
                curve.add(state.global_step, reward=float(logs["reward"]), rollouts=state.global_step * samples)
                if not math.isfinite(float(logs["grad_norm"])):
                    print(f"[{time.time() - BEGAN:.0f} s] step {state.global_step}: the gradient is {logs['grad_norm']}", flush=True)
                    control.should_training_stop = True

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % EVERY == 0:
                curve.add(state.global_step, heldout=evaluate(model, tokenizer, heldout), rollouts=state.global_step * samples)
            control.should_training_stop |= time.time() - BEGAN > arguments.seconds or state.global_step >= arguments.steps

    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=samples,
            num_generations=NUM_ROLLOUTS,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=TEMPERATURE,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=WARMUP,
            max_steps=arguments.steps,
            bf16=torch.cuda.is_available() and not arguments.float32,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=arguments.seed,
        )
        rows = Dataset.from_list(read_rows(arguments.folder / "sums.jsonl"))
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward, args=config, train_dataset=rows, processing_class=tokenizer, callbacks=[Watch()]
        )
        curve.add(0, heldout=evaluate(model, tokenizer, heldout))
        trainer.train()
    if torch.cuda.is_available():
        print(f"memory: {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)


if __name__ == "__main__":
    main()
