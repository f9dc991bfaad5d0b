"""A multi-turn agent with a tool, as a producer of streamrl: the model calls a calculator, which does one step at a time, and answers.

calculator_openai.py is the same agent on OpenAI's SDK; the calculator and the reward are these.

`python calculator.py` writes calculator.jsonl and calculator-heldout.jsonl beside this file. Each row has two worked examples in front of
its question, from which the model has the form of a call. The numbers are too large for it to do in its head.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

CALL = re.compile(r"calc\((-?\d{1,9}) ([+*-]) (-?\d{1,9})\)")
TURNS = 4
HELD_OUT = 192
EXAMPLES = [
    {"role": "user", "content": "What is 312 * 47?"},
    {"role": "assistant", "content": "calc(312 * 47)"},
    {"role": "tool", "content": "14664"},
    {"role": "assistant", "content": "14664"},
    {"role": "user", "content": "What is 528 * 36 - 145?"},
    {"role": "assistant", "content": "calc(528 * 36)"},
    {"role": "tool", "content": "19008"},
    {"role": "assistant", "content": "calc(19008 - 145)"},
    {"role": "tool", "content": "18863"},
    {"role": "assistant", "content": "18863"},
]


def calculate(left: int, sign: str, right: int) -> int:
    """Do one step."""
    return {"+": left + right, "-": left - right, "*": left * right}[sign]


def result_of(text: str) -> str | None:
    """Give what the calculator says to a turn of the model; None where the turn is no call, and so the answer."""
    call = CALL.fullmatch(text.strip())
    if call is None:
        return None
    left, sign, right = call.groups()
    return str(calculate(int(left), sign, int(right)))


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
    """Make questions of one step or of two, no two alike: a product of numbers of three to five digits, and a number more or less."""
    found: dict[str, str] = {}
    while len(found) < count:
        left, right, more = (rng.randint(100, 10**digits - 1) for digits in (rng.randint(3, 5), 3, rng.randint(3, 4)))
        question, result = f"What is {left} * {right}", left * right
        if steps == 2:
            sign = rng.choice("+-")
            question, result = f"{question} {sign} {more}", calculate(result, sign, more)
        found[f"{question}?"] = str(result)
    return [{"prompt": [*EXAMPLES, {"role": "user", "content": question}], "label": label} for question, label in found.items()]


def split(seed: int = 0) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """Make 1,200 rows to train on, one of one step for each two of two steps, and the held-out ones, those of one step first."""
    rng = random.Random(seed)
    one, two = rows(400 + HELD_OUT // 3, 1, rng), rows(800 + 2 * HELD_OUT // 3, 2, rng)
    train = one[HELD_OUT // 3 :] + two[2 * HELD_OUT // 3 :]
    rng.shuffle(train)
    return train, one[: HELD_OUT // 3] + two[: 2 * HELD_OUT // 3]


if __name__ == "__main__":
    here = Path(__file__).parent
    for name, some in zip(("calculator", "calculator-heldout"), split(), strict=True):
        (here / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
