"""Writes problems.jsonl: five numbers and what is asked of them. The label is a program, for the warm-up; the answer is what it gives."""

from __future__ import annotations

import json
import random
from pathlib import Path

chosen = random.Random(0)
rows = []
for asked, function in (("max", max), ("sum", sum), ("len", len)):
    for _ in range(8):
        n = [chosen.randint(0, 3) for _ in range(chosen.randint(2, 4))]
        while function(n) > 9:
            n = [chosen.randint(0, 3) for _ in range(3)]
        rows.append({"prompt": f"n = {n}; {asked}", "label": f"{asked}(n)", "metadata": {"answer": str(function(n))}})
chosen.shuffle(rows)
text = "".join(json.dumps(row) + "\n" for row in rows)
Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")
