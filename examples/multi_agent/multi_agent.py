"""Three roles of one policy: solvers answer side by side, rewriters look at one answer each, a selector takes one. All are trained."""

from __future__ import annotations

import asyncio


async def agent(task, engine):
    solvers = [engine.chat(task) for _ in range(engine.options["solvers"])]
    solutions = await answers(solvers)
    rewriters = [engine.chat(f"{task.prompt}? {solution}") for solution in solutions]
    candidates = await answers(rewriters)
    selector = engine.chat(f"{task.prompt}? {' or '.join(candidates)}")
    selected = (await selector.generate()).text
    # One rollout of seven token sequences, each with a reward of its own: a solver is compared with the solvers of its group, and so on.
    parts = graded(task.label, candidates, selected)
    return [
        *episodes(solvers, "solver", solutions, task.label),
        *episodes(rewriters, "rewriter", candidates, task.label),
        selector.episode(agent="selector", reward=sum(parts.values()), reward_parts=parts),
    ]


async def answers(chats):
    """What each chat says next; their requests are with the engine at once."""
    return [turn.text for turn in await asyncio.gather(*[chat.generate() for chat in chats])]


def episodes(chats, role, texts, label):
    return [
        chat.episode(agent=f"{role}/{index}", reward=float(text == label))
        for index, (chat, text) in enumerate(zip(chats, texts, strict=True))
    ]


def graded(label, candidates, selected):
    """The selector's reward, which is the rollout's: that of the last episode."""
    return {"selected": 0.1 if selected in candidates else 0.0, "right": 0.9 if selected == label else 0.0}
