"""Writes problems.jsonl: lists of numbers with what is asked of them, and results that only have to be read.

A label is what the warm-up shows for the first turn: the program, or the answer. The reward compares with the answer.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

FUNCTIONS = {"max": max, "sum": sum, "len": len}
chosen = random.Random(0)
rows = []
for name, function in FUNCTIONS.items():
    for answer in range(1, 5):
        n = []
        while not n or function(n) != answer:
            n = [chosen.randint(0, 4) for _ in range(chosen.randint(1, 4))]
        rows.append({"prompt": f"n = {n}; {name}", "label": f"{name}(n)", "metadata": {"answer": str(answer)}})
        rows.append({"prompt": f"n = {n}; {name}(n) is {answer}", "label": str(answer), "metadata": {"answer": str(answer)}})
chosen.shuffle(rows)
text = "".join(json.dumps(row) + "\n" for row in rows)
Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")
