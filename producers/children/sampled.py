"""Which tokens of an episode were sampled where: an index of a call's turns, in which each token of a segment is looked up once.

The index of parts is a suffix automaton (Blumer et al., 1985): of n sampled tokens it is made in O(n), and finds the longest beginning
of a text that is part of a turn in as many steps as that has tokens. So an episode of however many turns is handed over in O(n).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property
from itertools import zip_longest

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.children.remote import Heard
from streamrl.producers.episode import Segment
from streamrl.schemas.samples import VersionSpan

Part = tuple[int, int, int]
"""(turn, start, stop)"""
Drawn = tuple[tuple[VersionSpan, ...], float | None, bytes]
"""Versions of a turn's tokens, their temperature, and all of their sampling as JSON."""


class Sampled:
    """The turns of a call that is over."""

    def __init__(self, turns: Sequence[Heard]) -> None:
        self._turns = turns

    def parts_of(self, segment: Segment) -> tuple[Part, ...]:
        """Where a segment's tokens were sampled, in their order: a whole turn, or the longest parts of turns from the left.

        Raises:
            SchemaError: some were not sampled in this call.
        """
        tokens = _tokens([int(token) for token in segment.token_ids], [float(value) for value in segment.logprobs])
        if (same := self._whole.get(tokens)) is not None:
            # Of turns with equal tokens the one with equal versions and sampling first.
            return ((same.get(_drawn(segment, segment.temperature), next(iter(same.values()))), 0, len(tokens)),)
        parts: list[Part] = []
        place = 0
        while place < len(tokens):
            turn, start, length = self._parts.longest(tokens, place)
            if not length:
                raise SchemaError(
                    f"token {place} of {len(tokens)} in a segment of the model was not sampled by an engine in this rollout",
                    hint="leave what the model wrote as it is; tokens of your own go into a segment without log-probs",
                )
            parts.append((turn, start, start + length))
            place += length
        return tuple(parts)

    @cached_property
    def _whole(self) -> dict[tuple[Hashable, ...], dict[Drawn, int]]:
        """By tokens, then by how they were drawn: the first such turn. A segment made by hand may not say its sampling."""
        found: dict[tuple[Hashable, ...], dict[Drawn, int]] = {}
        for number, turn in enumerate(self._turns):
            same = found.setdefault(_tokens(turn.token_ids, turn.logprobs), {})
            for how in (_drawn(turn, turn.temperature), _drawn(turn, turn.temperature, said=False), _drawn(turn, None, said=False)):
                same.setdefault(how, number)
        return found

    @cached_property
    def _parts(self) -> _Automaton:
        automaton = _Automaton()
        for number, turn in enumerate(self._turns):
            for place, token in enumerate(_tokens(turn.token_ids, turn.logprobs)):
                automaton.add(token, (number, place))
            automaton.add(("end of turn", number), (number, len(turn.token_ids)))  # no part goes beyond it
        return automaton


class _Automaton:
    """States are classes of parts that end at the same places; state 0 is the empty part."""

    def __init__(self) -> None:
        self._next: list[dict[Hashable, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._ends: list[tuple[int, int]] = [(0, -1)]
        """Where the first of the parts of a state ends: (turn, place of its last token)."""
        self._last = 0

    def add(self, token: Hashable, place: tuple[int, int]) -> None:
        """The next token of the text, which is at `place`."""
        new = self._state({}, 0, self._length[self._last] + 1, place)
        state, self._last = self._last, new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            return
        old = self._next[state][token]
        if self._length[old] == self._length[state] + 1:
            self._link[new] = old
            return
        copy = self._state(dict(self._next[old]), self._link[old], self._length[state] + 1, self._ends[old])
        while state >= 0 and self._next[state].get(token) == old:
            self._next[state][token] = copy
            state = self._link[state]
        self._link[old] = self._link[new] = copy

    def _state(self, following: dict[Hashable, int], link: int, length: int, end: tuple[int, int]) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._ends.append(end)
        return len(self._next) - 1

    def longest(self, tokens: Sequence[Hashable], place: int) -> Part:
        """The longest part of a turn that stands in `tokens` at `place`, the first such: (turn, start, length); length 0 for none."""
        state = length = 0
        while place + length < len(tokens) and (following := self._next[state].get(tokens[place + length])) is not None:
            state = following
            length += 1
        turn, last = self._ends[state]
        return turn, last - length + 1, length


def _drawn(turn: Heard | Segment, temperature: float | None, *, said: bool = True) -> Drawn:
    return tuple(turn.spans), temperature, msgspec.json.encode(turn.sampling) if said and turn.sampling is not None else b""


def _tokens(token_ids: Sequence[int], logprobs: Sequence[float]) -> tuple[Hashable, ...]:
    """What is compared: a token with its log-prob. One that lacks either is no turn's."""
    return tuple(zip_longest(token_ids, logprobs))
