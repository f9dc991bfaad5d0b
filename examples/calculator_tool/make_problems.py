"""Writes problems.jsonl: the sums of two digits from 0 to 3."""

from __future__ import annotations

import json
from pathlib import Path

rows = [{"prompt": f"{left}+{right}=", "label": str(left + right)} for left in range(4) for right in range(4)]
text = "".join(json.dumps(row) + "\n" for row in rows)
Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")
