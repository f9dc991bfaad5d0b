"""A producer of two turns and its reward: a policy that cannot add learns to ask the calculator and to repeat what it says."""

from __future__ import annotations

CALL = "?"


async def calculator(task, engine):
    chat = engine.chat(task)
    turn = await chat.generate()
    if turn.text == CALL:
        left, right = task.prompt.rstrip("=").split("+")
        chat.tool(str(int(left) + int(right)))
        await chat.generate()
    return chat.episode()


def score(task, episode):
    called = episode.turns[0] == CALL
    return {
        "called": 0.3 if called else 0.0,
        "number": 0.2 if called and episode.completion.isdigit() else 0.0,
        "right": 0.5 if episode.completion == task.label else 0.0,
    }
