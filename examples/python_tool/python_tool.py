"""A tool that runs the model's own programs: what it writes goes to the sandbox, what that prints comes back, and then it answers."""

from __future__ import annotations

import re

from streamrl.sandbox import Limits, run_python

LIMITS = Limits(seconds=10, cpu_seconds=2, memory_bytes=256 << 20, processes=4, output_bytes=10_000)
# As a notebook does: the program runs, and the value of its last line is printed if it has one.
NOTEBOOK = """
import ast
body = ast.parse(open("cell.py").read()).body
last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
names = {}
exec(compile(ast.Module(body, []), "cell.py", "exec"), names)
if last is not None and (value := eval(compile(ast.Expression(last.value), "cell.py", "eval"), names)) is not None:
    print(value)
"""


async def agent(task, engine):
    chat = engine.chat(task)
    given = task.prompt.partition(";")[0]
    ran = []
    turn = await chat.generate()
    while not is_answer(turn.text) and len(ran) < engine.options["programs"] and not chat.is_full:
        result = await run_python(NOTEBOOK, files={"cell.py": f"{given}\n{turn.text}"}, limits=LIMITS)
        ran.append(result.reason)
        chat.tool(shown(result))
        turn = await chat.generate(max_new_tokens=engine.options["answer_tokens"])
    return chat.episode(metadata={"ran": ran})


def is_answer(text):
    return re.fullmatch(r"\s*-?\d+\s*", text) is not None


def shown(result):
    """What the model sees: the output, or why there is none, in a few words."""
    if result.reason == "ok":
        return result.stdout.strip()[:200]
    return (result.detail or result.stderr.strip().rpartition("\n")[2])[:200]


def score(task, episode):
    ran = episode.metadata["ran"]
    return {
        "ran": 0.3 if ran and ran[-1] == "ok" else 0.0,
        "right": 0.7 if episode.completion.strip() == task.metadata["answer"] else 0.0,
    }
