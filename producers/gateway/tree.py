r"""The turns of a session as a tree, token for token: what a call keeps of them, and what is trained of them in the end. No I/O.

```text
prompt -- turn 0 -- turn 1            sample 0: prompt, turn 0, turn 1
             \
              `---- turn 2            sample 1: prompt, turn 0 (masked), turn 2; a branch of sample 0 behind turn 0
```

What a call keeps is a path from a prompt, and its tokens are those that the engines gave: nothing is decoded and tokenised again. A turn is
trained once, in the sample that was begun first. A last turn that is not the newest answer to its prompt was given up by the agent: it is
`abandoned` and not trained; a turn that others go on from is trained although all of these were abandoned.

So is one that the agent tells in other words (`retold`): what follows is context, and another sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from streamrl.errors import SchemaError
from streamrl.producers.gateway.entries import OWN_PROMPT, TASK_PROMPT, Turn, packed_ids, unpacked_ids


class Node:
    """A prompt, or a turn with what came between its parent and it. Made by `Tree`.

    Args:
        number: of the turn; that of a prompt is negative.
        parent: None: it is a prompt.
        heard: digests of the messages that it adds, a turn's own not included.
        context: their tokens.
        turn: None: it is a prompt.
        family: of its prompt.
    """

    def __init__(
        self, number: int, parent: Node | None, heard: tuple[bytes, ...], context: tuple[int, ...], turn: Turn | None, family: int
    ) -> None:
        self.number = number
        self.parent = parent
        self.heard = heard
        self.turn = turn
        self.family = family
        self.children: list[Node] = []
        self._context = packed_ids(context)
        self.end = (parent.end if parent is not None else 0) + len(context) + (len(turn.tokens.ids) // 4 if turn is not None else 0)
        """Tokens from the beginning of the prompt through its last one."""

    @property
    def context(self) -> tuple[int, ...]:
        """Tokens of what came before the turn."""
        return unpacked_ids(self._context)

    @property
    def own_ids(self) -> tuple[int, ...]:
        """The tokens that it adds."""
        return self.context + (self.turn.tokens.token_ids if self.turn is not None else ())

    def path(self) -> list[Node]:
        """From its prompt to itself."""
        found: list[Node] = []
        node: Node | None = self
        while node is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def token_ids(self) -> list[int]:
        """Of the whole path."""
        return [token for node in self.path() for token in node.own_ids]


class Strand(msgspec.Struct, frozen=True):
    """One sample: a path, of which the first `num_shared` tokens are trained elsewhere or are no model's."""

    nodes: tuple[Node, ...]
    """From the prompt on."""
    num_own: int
    """Nodes at the end of the path that are trained here."""
    parent: int | None
    """Index of the strand that it leaves."""
    num_shared: int
    """Tokens that it has in common with that one."""
    is_newest: bool
    """Whether it ends with the newest answer to the task's prompt, or of all where there is none."""


Fits = Callable[[Node, int], int]
"""Where a call's content ends that a node adds, given where its parent's has ended; negative: the call does not keep the node."""


class Tree:
    """The turns of one session.

    Args:
        prompt_ids: of the task.
        heard: digests of its prompt's messages.
    """

    def __init__(self, prompt_ids: Sequence[int], heard: Sequence[bytes]) -> None:
        self.prompts = [Node(-1, None, tuple(heard), tuple(prompt_ids), None, 0)]
        """The task's, then others in the order in which they came."""
        self.turns: list[Node] = []

    def add(self, turn: Turn) -> Node:
        """The next turn; raises SchemaError for one that no tree can have, which only a damaged journal gives."""
        heard, context = turn.heard, unpacked_ids(turn.context)
        if turn.parent == OWN_PROMPT:
            parent = self._prompt(heard, context, turn.family)
            heard, context = (), ()
        elif turn.parent == TASK_PROMPT:
            parent = self.prompts[0]
        elif 0 <= turn.parent < len(self.turns):
            parent = self.turns[turn.parent]
        else:
            raise SchemaError(f"expected turn {len(self.turns)} of a session to go on from an earlier one, got {turn.parent}")
        node = Node(len(self.turns), parent, heard, context, turn, parent.family)
        parent.children.append(node)
        self.turns.append(node)
        return node

    def deepest(self, fits: Fits) -> tuple[Node | None, int]:
        """The node that keeps most of a call's content, the newest of several, and where its content ends; None: no prompt fits."""
        best: tuple[int, int, Node] | None = None
        left = [(prompt, 0) for prompt in self.prompts]
        while left:
            node, start = left.pop()
            end = fits(node, start)
            if end < 0:
                continue
            if best is None or (end, node.number) > best[:2]:
                best = (end, node.number, node)
            left += [(child, end) for child in node.children]
        return (None, 0) if best is None else (best[2], best[0])

    def new_family(self) -> int:
        """For a prompt of the agent's own."""
        return 1 + max(prompt.family for prompt in self.prompts)

    def strands(self) -> tuple[list[Strand], int]:
        """What is trained, each turn once, in the order in which the samples were begun; and how many turns were abandoned."""
        newest = {node.family: node for node in self.turns}
        retold = {number for node in self.turns if node.turn is not None for number in node.turn.retold}
        kept = [node for node in self.turns if node.children or newest[node.family] is node or node.number in retold]
        owner: dict[int, int] = {}
        """Index of the strand that trains a turn; for a prompt, of its first strand."""
        ends: list[Node] = []
        begins: list[tuple[Node, int | None, int]] = []
        for node in kept:
            parent = node.parent
            assert parent is not None
            index = owner.get(parent.number)
            if index is not None and parent.turn is not None and ends[index] is parent:
                ends[index] = node
            else:
                begins.append((node, *_left(parent, index, [begin[0] for begin in begins])))
                index = len(ends)
                ends.append(node)
                owner.setdefault(parent.number, index)
            owner[node.number] = index
        last = newest.get(0) or (self.turns[-1] if self.turns else None)
        return [_strand(end, *begin, is_newest=end is last) for end, begin in zip(ends, begins, strict=True)], len(self.turns) - len(kept)

    def _prompt(self, heard: tuple[bytes, ...], ids: tuple[int, ...], family: int) -> Node:
        for prompt in self.prompts[1:]:
            if prompt.heard == heard and prompt.context == ids:
                return prompt
        self.prompts.append(Node(-1 - len(self.prompts), None, heard, ids, None, family))
        return self.prompts[-1]


def _left(parent: Node, index: int | None, begun: Sequence[Node]) -> tuple[int | None, int]:
    """Of a strand that begins behind `parent`: the one that it leaves, and the tokens that both have.

    Behind another prompt that begins with the task's, it leaves the first strand of these, at the token in which the prompts part.
    """
    if index is not None:
        return index, parent.end
    first = next((number for number, node in enumerate(begun) if node.family == 0), None)
    if first is None or parent.family != 0:
        return None, 0
    shared = _common(parent.context, begun[first].path()[0].context)
    return (first, shared) if shared else (None, 0)


def _strand(end: Node, begin: Node, parent: int | None, num_shared: int, *, is_newest: bool) -> Strand:
    nodes = tuple(end.path())
    return Strand(nodes, len(nodes) - nodes.index(begin), parent, num_shared, is_newest)


def _common(some: Sequence[int], others: Sequence[int]) -> int:
    pairs: Iterator[bool] = (one == other for one, other in zip(some, others, strict=False))
    return next((index for index, same in enumerate(pairs) if not same), min(len(some), len(others)))


def fits_messages(digests: Sequence[bytes]) -> Fits:
    """For a call of messages: a turn is kept when what was heard before it is the same, and what it said is."""

    def fits(node: Node, start: int) -> int:
        end = start + len(node.heard)
        if tuple(digests[start:end]) != node.heard:
            return -1
        if node.turn is None:
            return end
        return end + 1 if end < len(digests) and digests[end] in (node.turn.said, *node.turn.said_in_part) else -1

    return fits


def fits_tokens(ids: Sequence[int]) -> Fits:
    """For a call of token ids."""

    def fits(node: Node, start: int) -> int:
        own = node.own_ids
        end = start + len(own)
        return end if tuple(ids[start:end]) == own else -1

    return fits


def fits_text(text: str, shown: Callable[[Node], str]) -> Fits:
    """For a call of text; `shown` is the text of what a node adds, as the agent was given it."""

    def fits(node: Node, start: int) -> int:
        own = shown(node)
        return start + len(own) if text.startswith(own, start) else -1

    return fits
