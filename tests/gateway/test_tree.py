"""The tree of a session's turns: what is kept is a prefix by tokens, and each turn is trained exactly once."""

from __future__ import annotations

from array import array
from collections import Counter

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamrl.producers.gateway.entries import OWN_PROMPT, TASK_PROMPT, Tokens, Turn, packed_ids, unpacked_ids
from streamrl.producers.gateway.tree import Node, Tree, fits_messages, fits_tokens
from streamrl.schemas.samples import LogprobMode, VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version

PROMPT_IDS, PROMPT_HEARD = (1, 2, 3), (b"tools", b"question")


def turn(
    parent: int, said: bytes, ids: list[int], *, heard: tuple[bytes, ...] = (), context: tuple[int, ...] = (), family: int = 0
) -> Turn:
    tokens = Tokens(
        packed_ids(ids), array("d", [-0.5] * len(ids)).tobytes(), (VersionSpan(len(ids), Version(0, 1)),), LogprobMode.SAMPLED, "stop", "e"
    )
    return Turn(
        parent=parent,
        heard=heard,
        context=packed_ids(context),
        family=family,
        said=said,
        tokens=tokens,
        sampling=Sampling(),
        seed=0,
        request=said,
    )


def tree() -> Tree:
    return Tree(PROMPT_IDS, PROMPT_HEARD)


def test_a_conversation_is_one_strand() -> None:
    t = tree()
    t.add(turn(TASK_PROMPT, b"a", [10, 11]))
    t.add(turn(0, b"b", [12], heard=(b"more",), context=(4, 5)))
    [strand], abandoned = t.strands()
    assert abandoned == 0 and strand.parent is None and strand.is_newest
    assert strand.nodes[-1].token_ids() == [1, 2, 3, 10, 11, 4, 5, 12]
    node, end = t.deepest(fits_messages([*PROMPT_HEARD, b"a", b"more", b"b", b"new"]))
    assert node is t.turns[1] and end == 5


def test_a_fork_that_is_not_gone_on_with_is_abandoned() -> None:
    t = tree()
    t.add(turn(TASK_PROMPT, b"a", [10]))
    t.add(turn(0, b"b", [11], heard=(b"x",), context=(4,)))
    t.add(turn(0, b"c", [12], heard=(b"y",), context=(5,)))
    [strand], abandoned = t.strands()
    assert abandoned == 1
    assert strand.nodes[-1].token_ids() == [1, 2, 3, 10, 5, 12]


def test_what_is_shared_is_trained_in_the_strand_that_was_begun_first() -> None:
    t = tree()
    t.add(turn(TASK_PROMPT, b"a", [10]))
    t.add(turn(0, b"b", [11], heard=(b"x",), context=(4,)))
    t.add(turn(0, b"c", [12], heard=(b"y",), context=(5,)))
    t.add(turn(1, b"d", [13], heard=(b"z",), context=(6,)))
    t.add(turn(2, b"e", [14], heard=(b"w",), context=(7,)))
    first, second = t.strands()[0]
    assert [node.number for node in first.nodes] == [-1, 0, 1] and first.num_own == 2, "its last turn was abandoned"
    assert [node.number for node in second.nodes] == [-1, 0, 2, 4] and second.num_own == 2
    assert (second.parent, second.num_shared) == (0, 4) and second.is_newest and not first.is_newest


def test_compaction_begins_a_strand_that_shares_the_beginning_of_the_prompt() -> None:
    t = tree()
    t.add(turn(TASK_PROMPT, b"a", [10]))
    t.add(turn(0, b"b", [11], heard=(b"x",), context=(4,)))
    t.add(turn(OWN_PROMPT, b"c", [12], heard=(*PROMPT_HEARD, b"summary"), context=(1, 2, 9)))
    first, second = t.strands()[0]
    assert first.nodes[-1].number == 0, "the turn that was compacted away is abandoned, the one before it is not"
    assert (second.parent, second.num_shared, second.nodes[-1].token_ids()) == (0, 2, [1, 2, 9, 12])
    t.add(turn(OWN_PROMPT, b"d", [13], heard=(b"tools", b"other"), context=(7, 8), family=1))
    third = t.strands()[0][2]
    assert (third.parent, third.num_shared, third.is_newest) == (None, 0, False), "a prompt of the agent's own is of nobody"


def test_of_two_turns_that_say_the_same_the_newest_is_kept() -> None:
    t = tree()
    t.add(turn(TASK_PROMPT, b"a", [10]))
    t.add(turn(TASK_PROMPT, b"a", [11, 12]))
    assert t.deepest(fits_messages([*PROMPT_HEARD, b"a"]))[0] is t.turns[1]
    assert t.deepest(fits_messages([b"tools", b"another question", b"a"]))[0] is None


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["append", "retry", "rewrite", "compact", "own"]), st.integers(0, 7), st.integers(1, 4)), max_size=24
)


class Agent:
    """Acts on conversations as an agent sees them: messages in, an answer out; knows no tokens."""

    def __init__(self) -> None:
        self.tree = tree()
        self.seen: list[tuple[tuple[bytes, ...], list[int]]] = []
        """Each answered conversation, its answer last, and the tokens that the engine was given and gave for it."""
        self.count = 0

    def word(self) -> bytes:
        self.count += 1
        return b"m%d" % self.count

    def call(self, messages: tuple[bytes, ...], length: int) -> None:
        node, end = self.tree.deepest(fits_messages(messages))
        rest = messages[end:]
        context = tuple(100 + self.count + i for i in range(len(rest)))
        family = 0
        if node is not None and node.turn is not None:
            parent, kept, heard = node.number, node.token_ids(), rest
        elif node is not None and not rest:
            parent = TASK_PROMPT if node is self.tree.prompts[0] else OWN_PROMPT
            kept, heard, context, family = [], node.heard if parent == OWN_PROMPT else (), node.context, node.family
        else:
            parent, kept, heard, family = OWN_PROMPT, [], messages, self.tree.new_family() if node is None else node.family
            context = (*PROMPT_IDS[:2], *context) if family == 0 else context
        prompt = [*kept, *context]
        said, ids = self.word(), [1000 * (len(self.tree.turns) + 1) + i for i in range(length)]
        added = self.tree.add(turn(parent, said, ids, heard=heard, context=() if parent == TASK_PROMPT else context, family=family))
        assert added.token_ids() == [*prompt, *ids], "what the engine was given and gave is the path, token for token"
        self.seen.append(((*messages, said), [*prompt, *ids]))

    def act(self, kind: str, which: int, length: int) -> None:
        past, ids = self.seen[which % len(self.seen)] if self.seen else (PROMPT_HEARD, list(PROMPT_IDS))
        if kind == "own":
            self.call((b"tools", self.word()), length)
        elif not self.seen or kind == "retry":
            self.call(past[:-1] if self.seen else past, length)
        elif kind == "append":
            before = len(ids)
            self.call((*past, self.word()), length)
            assert self.seen[-1][1][:before] == ids, "what was kept is a prefix"
        elif kind == "rewrite":
            self.call((*past[:-1], self.word(), self.word()), length)
        else:
            self.call((*PROMPT_HEARD, self.word()), length)


@given(ACTIONS)
def test_any_agent_gets_token_exact_strands_that_train_each_turn_once(actions: list[tuple[str, int, int]]) -> None:
    agent = Agent()
    for action in actions:
        agent.act(*action)
    t = agent.tree
    strands, abandoned = t.strands()
    trained: Counter[int] = Counter(node.number for strand in strands for node in strand.nodes[-strand.num_own :])
    assert set(trained.values()) <= {1} and len(trained) + abandoned == len(t.turns)
    whole = {tuple(ids) for _, ids in agent.seen}
    for index, strand in enumerate(strands):
        ids = strand.nodes[-1].token_ids()
        assert tuple(ids) in whole, "a strand is what an engine was given and gave"
        if strand.parent is not None:
            assert strand.parent < index
            assert ids[: strand.num_shared] == strands[strand.parent].nodes[-1].token_ids()[: strand.num_shared]
            assert strand.num_shared <= len(ids) - sum(len(node.own_ids) for node in strand.nodes[-strand.num_own :])
    continued = {node.parent.number for node in t.turns if node.parent is not None}
    newest = {node.family: node.number for node in t.turns}
    assert set(trained) == {node.number for node in t.turns if node.number in continued or newest[node.family] == node.number}
    assert sum(strand.is_newest for strand in strands) == bool(t.turns)
    for node in t.turns:
        assert t.deepest(fits_tokens(node.token_ids()))[1] == node.end


@given(ACTIONS)
def test_a_journal_gives_the_same_tree_again(actions: list[tuple[str, int, int]]) -> None:
    agent = Agent()
    for action in actions:
        agent.act(*action)
    again = tree()
    for node in agent.tree.turns:
        assert node.turn is not None
        again.add(msgspec.msgpack.decode(msgspec.msgpack.encode(node.turn), type=Turn))

    def told(t: Tree) -> list[tuple[list[int], int, int | None, int, bool]]:
        return [(s.nodes[-1].token_ids(), s.num_own, s.parent, s.num_shared, s.is_newest) for s in t.strands()[0]]

    assert told(again) == told(agent.tree)


def test_tokens_are_packed_without_loss() -> None:
    ids = [0, 1, 2**31 - 1]
    assert unpacked_ids(packed_ids(ids)) == tuple(ids)
    logprobs = [-0.1, -1e-300, float(np.float32(-0.3))]
    tokens = Tokens(packed_ids(ids), array("d", logprobs).tobytes(), (), LogprobMode.SAMPLED, "stop", "e")
    assert tokens.segment(Sampling()).logprobs == tuple(logprobs)
    assert isinstance(tree().prompts[0], Node)
