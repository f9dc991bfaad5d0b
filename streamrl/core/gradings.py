"""Which attempt at a rollout a reward is for, and rewards that come before their samples.

A task may be rolled out twice, when a producer died after it stored records and before its claim was done. Each attempt asks for rewards
of its own before it stores samples, and its samples say by which request (`Sample.grading`). The first samples of a rollout count, so
the answer to another attempt's request is for tokens that will not be trained: it changes nothing. A reward without a request (of a
user's service, a correction) is for whichever attempt counts.
"""

from __future__ import annotations

from collections.abc import Mapping

from streamrl.core.records import Ended, Rewarded, RolloutView
from streamrl.core.state import PendingRollout

MOST_EARLY = 1024
"""Answers that are kept of one rollout before its samples come: far more than one has agents, or attempts, for what is left out here is
waited for. A broken sender fills no memory."""


def key(task: int, rollout: int, grading: int = 0, agent: str = "") -> str:
    """Of an early reward, of a rollout or of one of its agents; it begins with the task."""
    return f"{task}/{rollout}" + (f"/{grading}" if grading else "") + (f"/@{agent}" if agent else "")


def is_for(record: Rewarded | Ended, rollout: PendingRollout) -> bool:
    """Whether a record is about the samples that have come of its rollout."""
    return record.grading in (0, rollout.grading)


def first_reward(
    early: Mapping[str, tuple[int, float]], task: int, view: RolloutView, own: float | None, agent: str = ""
) -> tuple[int, float | None]:
    """(revision, reward) of samples that come, or of those of an agent: the highest revision among the early ones and `own`, revision 0.

    Of equal revisions the one that came first counts, as it does among rewards that come later.
    """
    names = {key(task, view.rollout, agent=agent), key(task, view.rollout, view.grading, agent)}
    found = [one for name, one in early.items() if name in names]
    return max(found, key=lambda one: one[0], default=(0, own))


def with_early(early: Mapping[str, tuple[int, float]], record: Rewarded) -> dict[str, tuple[int, float]] | None:
    """The early rewards with one more at the end; None: it is superseded by one that is there, or there are too many of its rollout."""
    name = key(record.task, record.rollout, record.grading, record.agent)
    known = early.get(name)
    if known is not None and known[0] >= record.revision:
        return None
    if known is None and (record.grading or record.agent):
        of_rollout = key(record.task, record.rollout) + "/"
        if sum(other.startswith(of_rollout) for other in early) >= MOST_EARLY:
            return None
    return {**{other: value for other, value in early.items() if other != name}, name: (record.revision, record.reward)}


def without_early(early: Mapping[str, tuple[int, float]], task: int, rollout: int) -> dict[str, tuple[int, float]]:
    """The early rewards but for those of one rollout, whose samples have come."""
    own = key(task, rollout)
    return {name: value for name, value in early.items() if name != own and not name.startswith(own + "/")}
