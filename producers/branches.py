"""Which episodes of a rollout begin with the same tokens, so that each token is trained once: known from how chats left one another.

Equal tokens are not enough: two chats may have drawn the same ones, each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from streamrl.errors import SchemaError
from streamrl.producers.episode import Episode
from streamrl.schemas.samples import Branch

Lineage = tuple[tuple[int, int], ...]
"""From the chat that began it all to this one: (number of the chat, how many tokens it took over from the one before)."""


def num_shared(one: Lineage, other: Lineage) -> int:
    """How many tokens two chats have taken from the same place.

    Example: chats 1 and 2 have left chat 0 after 10 and after 7 tokens.

        >>> num_shared(((0, 0),), ((0, 0), (1, 10))), num_shared(((0, 0), (1, 10)), ((0, 0), (2, 7)))
        (10, 7)
    """
    if not one or not other or one[0] != other[0]:
        return 0
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
    # A chat may leave another before the place where that one left its own parent.
    return min((taken for _, taken in (*one[common:], *other[common:])), default=0)


def _num_shared(earlier: Episode, episode: Episode) -> int:
    if earlier.lineage != episode.lineage:
        return num_shared(earlier.lineage, episode.lineage)
    return earlier.num_tokens  # the same chat: as it was, and as it went on


def branched(episodes: Sequence[Episode]) -> Sequence[Episode]:
    """The episodes of a rollout in their order; those that begin like one before them say so. Those that say it themselves are left alone.

    Raises:
        SchemaError: a chat comes after one that has left it, or a second time without going on.
    """
    for index, episode in enumerate(episodes):
        for place, earlier in enumerate(episodes[:index]):
            same_chat = bool(episode.lineage) and earlier.lineage == episode.lineage
            if earlier is episode or (same_chat and earlier.num_tokens >= episode.num_tokens):
                raise SchemaError(
                    f"episode {index} of the rollout has no token that episode {place} has not, and would be trained a second time",
                    hint="return each chat's episode once, as it is at its end",
                )
        if episode.branch is not None or not episode.lineage:
            continue
        number = episode.lineage[-1][0]
        for earlier in episodes[:index]:
            if earlier.lineage != episode.lineage and number in {chat for chat, _ in earlier.lineage}:
                raise SchemaError(
                    f"episode {index} of the rollout comes after a branch that has left it",
                    hint="return a chat's episode before those of its branches",
                )
        shared = [_num_shared(earlier, episode) for earlier in episodes[:index]]
        if most := max(shared, default=0):
            episode.branch = Branch(shared.index(most), most)
    return episodes
