"""A problem that a table can hold and a tiny transformer learns in seconds: the last digit plus 3."""

import json
from pathlib import Path

TABLE = """
[run]
name = "digits"
steps = 15
[data]
train = "train.jsonl"
heldout = "heldout.jsonl"
chat_template = false
[tasks]
batch_tasks = 8
num_rollouts = 4
[sampling]
max_new_tokens = 3
[warmup]
max_steps = 200
until = 0.2
learning_rate = 0.1
[engine]
kind = "table"
[trainer]
backend = "table"
checkpoint_every = 5
[trainer.optimizer]
learning_rate = 0.05
"""
"""A whole run file, for the table of (previous token, position)."""
TRANSFORMER = """
[model]
hidden = 64
layers = 1
intermediate = 128
max_len = 8
[sampling]
max_new_tokens = 3
[producer]
concurrency = 32
[engine]
slots = 64
"""
"""The sections of a run file that say what a transformer for it is like, and how it is sampled."""


def write_digits(place: Path, run: str) -> None:
    """Put `run.toml` with the text `run` into a directory, and its rows: 90 to train on, 10 held out."""
    (place / "run.toml").write_text(run)
    rows = [{"prompt": f"{a}{b}", "label": str((b + 3) % 10)} for a in range(10) for b in range(10)]
    for name, part in (("train", rows[10:]), ("heldout", rows[:10])):
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
