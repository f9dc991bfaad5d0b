"""Writes problems.jsonl: questions that corpus.jsonl answers with one digit, and results that only have to be read.

A label is what the warm-up shows for the first turn: the query, or the answer. The reward compares with the answer.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

# Words of which each letter follows from the one before and its place, and whose last letters differ: more a table cannot keep.
QUESTIONS = {
    "earth": ("Which planet, counted from the sun, is the earth", "3"),
    "jupiter": ("Which planet, counted from the sun, is jupiter", "5"),
    "uranus": ("Which planet, counted from the sun, is uranus", "7"),
    "violin": ("How many strings has a violin", "4"),
    "insect": ("How many legs has an insect", "6"),
}
rows = []
for word, (question, answer) in QUESTIONS.items():
    rows.append({"prompt": question, "label": f"{word}</search>", "metadata": {"answer": answer}})
    rows.append({"prompt": f"{question}? It is {answer}", "label": answer, "metadata": {"answer": answer}})
random.Random(0).shuffle(rows)
text = "".join(json.dumps(row) + "\n" for row in rows)
Path(__file__).with_name("problems.jsonl").write_text(text, encoding="utf-8")
