"""Writes problems.jsonl: questions with one digit as their answer, and the same with it beside them, as rewriter and selector see it."""

from __future__ import annotations

import json
import random
from pathlib import Path

# Their last letters differ, for a table sees no more of a prompt.
QUESTIONS = {
    "How many sides has a square": "4",
    "How many sides has a pentagon": "5",
    "How many legs has an insect": "6",
    "How many days has a week": "7",
    "How many legs has a spider": "8",
}
rows = [{"prompt": question, "label": answer} for question, answer in QUESTIONS.items()]
rows += [{"prompt": f"{question}? {answer}", "label": answer} for question, answer in QUESTIONS.items()]
random.Random(0).shuffle(rows)
text = "".join(json.dumps(row) + "\n" for row in rows)
Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")
