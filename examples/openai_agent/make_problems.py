"""Writes problems.jsonl: sums to ask a calculator about, and sums with its answer, which only have to be read.

A label is what the warm-up shows for the first turn. The agent compares with the answer, which it finds in the metadata.
"""

from __future__ import annotations

import json
from pathlib import Path

rows = []
for left in range(1, 4):
    for right in range(4):
        answer = {"answer": str(left + right)}
        rows.append({"prompt": f"{left}+{right}=", "label": "?", "metadata": answer})
        rows.append({"prompt": f"{left}+{right}=?{left + right}", "label": str(left + right), "metadata": answer})
text = "".join(json.dumps(row) + "\n" for row in rows)
Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")
