"""A session's turns as the episodes of its rollout."""

from __future__ import annotations

from collections.abc import Sequence

from streamrl.producers.episode import STATUS, Episode, Segment
from streamrl.producers.gateway.session import Session
from streamrl.producers.gateway.tree import Strand
from streamrl.schemas.samples import Branch


def episodes_of(session: Session) -> tuple[list[Episode], int]:
    """One for each strand of its tree, and how many turns were abandoned."""
    strands, abandoned = session.tree.strands()
    return [_episode(session, strand) for strand in strands], abandoned


def _episode(session: Session, strand: Strand) -> Episode:
    context = session.context
    turns = [node.turn for node in strand.nodes[-strand.num_own :] if node.turn is not None]
    last = turns[-1].tokens
    text = session.rules.rendering.text
    reward = session.reward
    return Episode(
        segments=tuple(_segments(strand)),
        finish_reason=last.finish_reason,
        status=STATUS[last.finish_reason],
        turns=tuple(text(node.turn.tokens, node.turn.sampling) for node in strand.nodes if node.turn is not None),
        sampling=context.task.sampling,
        logprob_mode=last.mode,
        seed=context.seed,
        engine=last.engine,
        rollout=context.rollout_index,
        reward=None if reward is None else reward.reward,
        reward_parts={} if reward is None else dict(reward.parts),
        started_s=0.0 if session.started is None else session.started.started_s,
        finished_s=max(turn.made_s for turn in turns),
        branch=None if strand.parent is None else Branch(strand.parent, strand.num_shared),
        is_answer=strand.is_newest,
    )


def _segments(strand: Strand) -> Sequence[Segment]:
    """Of the whole path: what it shares with its parent is masked by its branch."""
    found: list[Segment] = []
    for node in strand.nodes:
        if node.context:
            found.append(Segment(node.context))
        if node.turn is not None:
            found.append(node.turn.tokens.segment(node.turn.sampling))
    return found
