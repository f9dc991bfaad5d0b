"""A multi-turn agent with a tool: the model calls a calculator, which does one step at a time, and ends with the number.

`python calculator.py` writes calculator.jsonl and calculator-heldout.jsonl beside this file. Each row has two worked examples in
front of its question, from which the model has the form of a call.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

CALL = re.compile(r"calc\((-?\d{1,9}) ([+*-]) (-?\d{1,9})\)")
TURNS = 4
EXAMPLES = [
    {"role": "user", "content": "What is 12 * 7 - 5?"},
    {"role": "assistant", "content": "calc(12 * 7)"},
    {"role": "tool", "content": "84"},
    {"role": "assistant", "content": "calc(84 - 5)"},
    {"role": "tool", "content": "79"},
    {"role": "assistant", "content": "79"},
    {"role": "user", "content": "What is 45 + 38?"},
    {"role": "assistant", "content": "calc(45 + 38)"},
    {"role": "tool", "content": "83"},
    {"role": "assistant", "content": "83"},
]


def calculate(left: int, sign: str, right: int) -> int:
    """Do one step."""
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


async def agent(task, engine):
    """Answer each call with its result; the first turn that is no call is the answer."""
    chat = engine.chat(task)
    for _ in range(TURNS):
        turn = await chat.generate()
        call = CALL.fullmatch(turn.text.strip())
        if call is None:
            break
        left, sign, right = call.groups()
        chat.tool(str(calculate(int(left), sign, int(right))))
    return chat.episode()


def score(task, episode):
    """Score 1 where the last turn is the number, else 0."""
    return float(episode.completion.strip() == task.label)


def rows(count: int, seed: int) -> list[dict[str, object]]:
    """Make questions of one step and of two, as many of each, with numbers of two digits."""
    rng = random.Random(seed)
    found: dict[str, str] = {}
    while len(found) < count:
        a, b, c = (rng.randint(11, 99) for _ in range(3))
        first, second = rng.choice("+-*"), rng.choice("+-")
        question, result = f"What is {a} {first} {b}", calculate(a, first, b)
        if len(found) % 2:
            question, result = f"{question} {second} {c}", calculate(result, second, c)
        found[f"{question}?"] = str(result)
    return [{"prompt": [*EXAMPLES, {"role": "user", "content": question}], "label": label} for question, label in found.items()]


if __name__ == "__main__":
    here = Path(__file__).parent
    found = rows(1256, seed=0)
    for name, some in (("calculator", found[256:]), ("calculator-heldout", found[:256])):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
