"""Short texts that obey instructions: rows and the reward, after IFEval (arXiv 2311.07911).

Each row asks for a sentence about something, with one instruction that a program can check. `python instructions.py` writes
instructions.jsonl and instructions-heldout.jsonl beside this file; topics of the held-out rows are in no row that is trained.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

_TOPICS = (
    "rain;the moon;a train station;bread;winter;an old clock;the sea;a garden;dogs;music;a bridge;the desert;a library;"
    "coffee;a river;bees;a market;stars;a storm;trees;a kitchen;paper;a mountain;snow;a bicycle;horses;glass;a lighthouse;"
    "tea;spiders;a village;salt;gold;a forest;an island;birds;a school;fire;cats;apples;a castle;shoes;a doctor;whales;"
    "a letter;the wind;a farmer;ice;a piano;a city;fish;summer;a painter;robots;a cake;sleep;a map;rice;a volcano;clouds"
)
TOPICS = _TOPICS.split(";")
CHECKS = {
    "Use only lowercase letters.": lambda text: text == text.lower(),
    "Use only capital letters.": lambda text: text == text.upper(),
    "Use no comma.": lambda text: "," not in text,
    "Use at most eight words.": lambda text: len(text.split()) <= 8,
    "Use at least fifteen words.": lambda text: len(text.split()) >= 15,
    "End with an exclamation mark.": lambda text: text.endswith("!"),
    "Put your whole answer in double quotes.": lambda text: len(text) > 2 and text[0] == text[-1] == '"',
    "Begin with the word Once.": lambda text: text.startswith("Once "),
}


def score(task, episode):
    """Score 1 where the answer has a word of the topic and obeys the instruction of its row, else 0."""
    text = episode.completion.strip()
    wanted = json.loads(task.label)
    about = any(word in text.lower() for word in re.findall(r"\w{3,}", wanted["topic"]) if word != "the")
    return float(about and CHECKS[wanted["instruction"]](text))


def rows(topics: list[str]) -> list[dict[str, str]]:
    """Make one row for each topic with each instruction, in an order that is the same everywhere."""
    found = [
        {"prompt": f"Write one sentence about {topic}. {instruction}", "label": json.dumps({"topic": topic, "instruction": instruction})}
        for topic in topics
        for instruction in CHECKS
    ]
    random.Random(0).shuffle(found)
    return found


if __name__ == "__main__":
    here = Path(__file__).parent
    for name, topics in (("instructions", TOPICS[:48]), ("instructions-heldout", TOPICS[48:])):
        text = "".join(json.dumps(row) + "\n" for row in rows(topics))
        (here / f"{name}.jsonl").write_text(text, encoding="utf-8")
