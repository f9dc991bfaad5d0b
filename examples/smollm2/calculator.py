"""A multi-turn agent with a tool, as a producer of streamrl: the model calls a calculator, which does one step a call, and answers.

calculator_openai.py is the same agent on OpenAI's SDK; the calculator and the reward are these.

`python calculator.py` writes calculator.jsonl and calculator-heldout.jsonl beside this file. Each row has two worked examples in front of
its question, from which the model has the form of a call. The numbers are too large for it to do in its head.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

CALL = re.compile(r"calc\((-?\d{1,12}(?: [+*-] -?\d{1,12})+)\)")
TURNS = 5
TRAIN = {1: 240, 2: 480, 3: 480}
HELD_OUT = {1: 40, 2: 80, 3: 80}
"""Rows by the number of their steps."""
EXAMPLES = [
    {"role": "system", "content": "Use the calculator, one step at a time."},
    {"role": "user", "content": "What is 312 * 47?"},
    {"role": "assistant", "content": "calc(312 * 47)"},
    {"role": "tool", "content": "14664"},
    {"role": "assistant", "content": "14664"},
    {"role": "user", "content": "What is 528 * 36 - 145?"},
    {"role": "assistant", "content": "calc(528 * 36 - 145)"},
    {"role": "tool", "content": "19008 - 145"},
    {"role": "assistant", "content": "calc(19008 - 145)"},
    {"role": "tool", "content": "18863"},
    {"role": "assistant", "content": "18863"},
]


def reduce(expression: str) -> str:
    """Do the first step of an expression of whole numbers, products before sums: `7 + 2 * 3` becomes `7 + 6`."""
    terms = expression.split()
    at = 2 * (terms[1::2].index("*") if "*" in terms[1::2] else 0)
    left, right = int(terms[at]), int(terms[at + 2])
    result = {"+": left + right, "-": left - right, "*": left * right}[terms[at + 1]]
    return " ".join([*terms[:at], str(result), *terms[at + 3 :]])


def result_of(text: str) -> str | None:
    """Give what the calculator says to a turn of the model; None where the turn is no call, and so the answer."""
    call = CALL.fullmatch(text.strip())
    return None if call is None else reduce(call[1])


async def agent(task, engine):
    """Answer each call with its result, until a turn is no call."""
    chat = engine.chat(task)
    turn = await chat.generate()
    for _ in range(TURNS - 1):
        result = result_of(turn.text)
        if result is None:
            break
        chat.tool(result)
        turn = await chat.generate()
    return chat.episode()


def score(task, episode):
    """Score 1 where the last turn is the number and nothing else, else 0: a result that the model does not state is no answer."""
    return float(episode.completion.strip() == task.label)


def rows(count: int, steps: int, rng: random.Random) -> list[dict[str, object]]:
    """Make `count` different questions of `steps` steps: a product with a number of three to five digits, then more to add or subtract."""
    found: dict[str, str] = {}
    while len(found) < count:
        expression = f"{rng.randint(100, 10 ** rng.randint(3, 5) - 1)} * {rng.randint(100, 999)}"
        for _ in range(steps - 1):
            expression += f" {rng.choice('+-')} {rng.randint(100, 10 ** rng.randint(3, 4) - 1)}"
        result = expression
        for _ in range(steps):
            result = reduce(result)
        found[f"What is {expression}?"] = result
    return [{"prompt": [*EXAMPLES, {"role": "user", "content": question}], "label": label} for question, label in found.items()]


def split(seed: int = 0) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Make the rows to train on, in any order, and the held-out ones, those of fewer steps first."""
    rng = random.Random(seed)
    train: list[dict[str, object]] = []
    held_out: list[dict[str, object]] = []
    for steps, count in HELD_OUT.items():
        found = rows(count + TRAIN[steps], steps, rng)
        held_out += found[:count]
        train += found[count:]
    rng.shuffle(train)
    return train, held_out


if __name__ == "__main__":
    here = Path(__file__).parent
    for name, some in zip(("calculator", "calculator-heldout"), split(), strict=True):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
