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
    parts = graded(task.label, solutions, candidates, selected)
    # One rollout of seven token sequences: they share the reward of the last one, and count once in their group.
    last = selector.episode(reward=sum(parts.values()), reward_parts=parts)
    return [*(chat.episode() for chat in (*solvers, *rewriters)), last]


async def answers(chats):
    """What each chat says next; their requests are with the engine at once."""
    return [turn.text for turn in await asyncio.gather(*[chat.generate() for chat in chats])]


def graded(label, solutions, candidates, selected):
    return {
        "solved": 0.3 * solutions.count(label) / len(solutions),
        "rewritten": 0.2 * candidates.count(label) / len(candidates),
        "selected": 0.1 if selected in candidates else 0.0,
        "right": 0.4 if selected == label else 0.0,
    }
