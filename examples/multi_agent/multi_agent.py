"""Three roles of one policy: solvers answer side by side, rewriters look at an answer each, a selector takes one. All of them are trained."""

from __future__ import annotations

import asyncio


async def agent(task, engine):
    solvers = [engine.chat(task) for _ in range(engine.options["solvers"])]
    solutions = await answers(solvers)
    rewriters = [engine.chat(f"{task.prompt}? {solution}") for solution in solutions]
    candidates = await answers(rewriters)
    selector = engine.chat(f"{task.prompt}? {' or '.join(candidates)}")
    await selector.generate()
    # One rollout of seven token sequences: they share the reward of the last one, and count once in their group.
    said = {"solutions": solutions, "candidates": candidates}
    return [chat.episode() for chat in (*solvers, *rewriters)] + [selector.episode(metadata=said)]


async def answers(chats):
    """What each chat says next; their requests are with the engine at once."""
    return [turn.text for turn in await asyncio.gather(*[chat.generate() for chat in chats])]


def score(task, episode):
    solutions, candidates = episode.metadata["solutions"], episode.metadata["candidates"]
    return {
        "solved": 0.3 * solutions.count(task.label) / len(solutions),
        "rewritten": 0.2 * candidates.count(task.label) / len(candidates),
        "selected": 0.1 if episode.completion in candidates else 0.0,
        "right": 0.4 if episode.completion == task.label else 0.0,
    }
