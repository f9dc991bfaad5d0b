"""Trees of turns, counted by hand: where a turn goes, what a call keeps, and what is trained where."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.producers.gateway.entries import OWN_PROMPT, TASK_PROMPT, Tokens, Turn, packed_ids, unpacked_ids
from streamrl.producers.gateway.tree import Fits, Node, Tree, fits_messages, fits_text, fits_tokens
from streamrl.schemas.samples import LogprobMode
from streamrl.schemas.tasks import Sampling

PROMPT, HEARD = (1, 2, 3), (b"tools", b"question")


def turn(parent: int, ids: Sequence[int], *, heard: Sequence[str | bytes] = (), context: Sequence[int] = (), family: int = 0) -> Turn:
    """Make a turn of these tokens that says the first of them; a text as `heard` is a letter a message."""
    tokens = Tokens(packed_ids(ids), b"", (), LogprobMode.SAMPLED, "stop", "e")
    said, told = b"%d" % ids[0], tuple(one.encode() if isinstance(one, str) else one for one in heard)
    about = {"heard": told, "context": packed_ids(context), "family": family}
    return Turn(parent=parent, said=said, tokens=tokens, sampling=Sampling(), seed=0, request=said, **about)  # type: ignore[arg-type]


def grown(*turns: Turn) -> Tree:
    tree = Tree(PROMPT, HEARD)
    for one in turns:
        tree.add(one)
    return tree


A = turn(TASK_PROMPT, [10, 11])
B = turn(0, [12], heard="x", context=[4, 5])
C = turn(0, [13], heard="y", context=[6])
OWN = turn(OWN_PROMPT, [20], heard="pq", context=[1, 2, 9])
OTHER = turn(OWN_PROMPT, [30], heard="r", context=[7], family=1)


def told(tree: Tree) -> str:
    """Tell each strand: its nodes, how many are trained there, where it leaves another, `*` for the newest; and the abandoned."""
    strands, abandoned = tree.strands()
    found = []
    for one in strands:
        leaves = "" if (one.parent, one.num_shared) == (None, 0) else f" of {one.parent} from {one.num_shared}"
        found.append(f"{'>'.join(str(node.number) for node in one.nodes)} {one.num_own}{leaves}{'*' * one.is_newest}")
    return f"{'; '.join(found)} | {abandoned}"


STRANDS: dict[str, tuple[list[Turn], str]] = {
    "nothing": ([], " | 0"),
    "one turn": ([A], "-1>0 1* | 0"),
    "a conversation": ([A, B, turn(1, [14])], "-1>0>1>2 3* | 0"),
    "a fork that is given up": ([A, B, C], "-1>0>2 2* | 1"),
    "the newest of a prompt": ([A, turn(TASK_PROMPT, [11])], "-1>1 1* | 1"),
    "a fork that is gone on with": ([A, B, C, turn(1, [14]), turn(2, [15])], "-1>0>1 2; -1>0>2>4 2 of 0 from 5* | 1"),
    "two answers to the prompt": ([A, turn(TASK_PROMPT, [16]), turn(0, [14]), turn(1, [15])], "-1>0 1; -1>1>3 2 of 0 from 3* | 1"),
    "three answers, all gone on with": (
        [A, turn(TASK_PROMPT, [16]), turn(TASK_PROMPT, [17]), turn(0, [14]), turn(1, [15]), turn(2, [18]), turn(3, [19])],
        "-1>0>3>6 3*; -1>1 1 of 0 from 3; -1>2 1 of 0 from 3 | 2",
    ),
    "a compacted prompt": ([A, B, OWN], "-1>0 1; -2>2 1 of 0 from 2* | 1"),
    "a compacted prompt alone": ([OWN], "-2>0 1* | 0"),
    "a prompt of the agent's own": ([A, OTHER], "-1>0 1*; -2>1 1 | 0"),
    "that prompt alone": ([OTHER], "-2>0 1* | 0"),
    "that prompt before": ([OTHER, A], "-2>0 1; -1>1 1* | 0"),
    "prompts that have nothing in common": ([A, B, turn(OWN_PROMPT, [20], heard="p", context=[8, 2, 3])], "-1>0 1; -2>2 1* | 1"),
    "a prompt that is longer": ([A, B, turn(OWN_PROMPT, [20], heard="p", context=[1, 2, 3, 4])], "-1>0 1; -2>2 1 of 0 from 3* | 1"),
    "that prompt before, with tokens in common": ([turn(OWN_PROMPT, [30], heard="r", context=[1, 8], family=1), A], "-2>0 1; -1>1 1* | 0"),
    "that prompt behind, with tokens in common": ([A, turn(OWN_PROMPT, [30], heard="r", context=[1, 8], family=1)], "-1>0 1*; -2>1 1 | 0"),
    "the same own prompt twice": (
        [OTHER, turn(OWN_PROMPT, [31], heard="r", context=[7], family=1), turn(0, [32]), turn(1, [33])],
        "-2>0 1; -2>1>3 2 of 0 from 1* | 1",
    ),
    "a fork of a fork": (
        [A, B, turn(1, [14]), turn(1, [15]), turn(2, [16]), turn(3, [17]), turn(0, [18]), turn(6, [19])],
        "-1>0>1>2 3; -1>0>1>3 1 of 0 from 8; -1>0>6>7 2 of 0 from 5* | 2",
    ),
}


@pytest.mark.parametrize("case", STRANDS)
def test_strands(case: str) -> None:
    turns, strands = STRANDS[case]
    assert told(grown(*turns)) == strands


def test_nodes_know_their_place() -> None:
    tree = grown(A, B, C, OWN, OTHER)
    assert [(node.number, node.family, node.end, node.context) for node in (*tree.prompts, *tree.turns)] == [
        (-1, 0, 3, (1, 2, 3)),
        (-2, 0, 3, (1, 2, 9)),
        (-3, 1, 1, (7,)),
        (0, 0, 5, ()),
        (1, 0, 8, (4, 5)),
        (2, 0, 7, (6,)),
        (3, 0, 4, ()),
        (4, 1, 2, ()),
    ]
    assert [node.heard for node in (*tree.prompts, *tree.turns)] == [HEARD, (b"p", b"q"), (b"r",), (), (b"x",), (b"y",), (), ()]
    assert [node.number for node in tree.turns[1].path()] == [-1, 0, 1]
    assert tree.turns[1].token_ids() == [1, 2, 3, 10, 11, 4, 5, 12] and tree.turns[1].own_ids == (4, 5, 12)
    assert tree.prompts[0].own_ids == PROMPT and tree.prompts[0].children == [tree.turns[0]]
    assert tree.turns[0].children == [tree.turns[1], tree.turns[2]] and tree.turns[0].parent is tree.prompts[0]
    assert grown(turn(TASK_PROMPT, [1, 2, 3])).turns[0].end == 6
    assert tree.new_family() == 2 and grown().new_family() == 1


def test_an_own_prompt_is_one_where_messages_and_tokens_are_the_same() -> None:
    tree = grown(
        OTHER,
        turn(OWN_PROMPT, [31], heard="r", context=[7], family=1),
        turn(OWN_PROMPT, [32], heard="r", context=[8], family=2),
        turn(OWN_PROMPT, [33], heard="s", context=[7], family=3),
    )
    assert [len(prompt.children) for prompt in tree.prompts] == [0, 2, 1, 1]
    tree.add(turn(OWN_PROMPT, [34], heard="", context=PROMPT))
    assert len(tree.prompts) == 5
    same = Tree((7,), (b"r",))
    same.add(OTHER)
    assert len(same.prompts) == 2, "the task's own is no other's"


@pytest.mark.parametrize("parent", [1, 2, -3])
def test_a_turn_goes_on_from_an_earlier_one(parent: int) -> None:
    tree = grown(A)
    with pytest.raises(SchemaError, match=f"turn 1 .* {parent}$"):
        tree.add(turn(parent, [9]))
    assert len(tree.turns) == 1
    tree.add(turn(0, [9]))
    with pytest.raises(SchemaError):
        tree.add(turn(2, [9]))


def shown(node: Node) -> str:
    return "".join(f"{token}." for token in node.own_ids)


TREE = grown(A, B, C, turn(TASK_PROMPT, [10, 11]), OTHER)
CALLS: list[tuple[Fits, int | None, int]] = [
    (fits_messages([*HEARD, b"10", b"x", b"12", b"new"]), 1, 5),
    (fits_messages([*HEARD, b"10", b"x", b"12"]), 1, 5),
    (fits_messages([*HEARD, b"10", b"x"]), 3, 3),
    (fits_messages([*HEARD, b"10", b"y", b"13"]), 2, 5),
    (fits_messages([*HEARD, b"10", b"z", b"13"]), 3, 3),
    (fits_messages([*HEARD]), -1, 2),
    (fits_messages([*HEARD, b"z"]), -1, 2),
    (fits_messages([b"r", b"30"]), 4, 2),
    (fits_messages([b"question", b"tools"]), None, 0),
    (fits_messages([]), None, 0),
    (fits_tokens([1, 2, 3, 10, 11, 4, 5, 12]), 1, 8),
    (fits_tokens([1, 2, 3, 10, 11, 6, 13, 99]), 2, 7),
    (fits_tokens([1, 2, 3, 10, 11]), 3, 5),
    (fits_tokens([1, 2, 3, 10]), -1, 3),
    (fits_tokens([7, 30]), 4, 2),
    (fits_tokens([1, 2]), None, 0),
    (fits_text("1.2.3.10.11.4.5.12.rest", shown), 1, 19),
    (fits_text("1.2.3.10.11.", shown), 3, 12),
    (fits_text("1.2.3.", shown), -1, 6),
    (fits_text("7.3", shown), -2, 2),
    (fits_text("2.3.", shown), None, 0),
]


@pytest.mark.parametrize(("fits", "number", "end"), CALLS)
def test_a_call_keeps_the_most_and_of_the_same_the_newest(fits: Fits, number: int | None, end: int) -> None:
    node, found = TREE.deepest(fits)
    assert (None if node is None else node.number, found) == (number, end)


def test_of_prompts_that_keep_the_same_it_is_the_tasks() -> None:
    tree = Tree(PROMPT, (b"p", b"q"))
    tree.add(OWN)
    assert tree.deepest(fits_messages([b"p", b"q"])) == (tree.prompts[0], 2)
    empty = Tree((), ())
    assert empty.deepest(fits_tokens([])) == (empty.prompts[0], 0)


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["append", "retry", "rewrite", "compact", "own"]), st.integers(0, 7), st.integers(1, 4)), max_size=24
)


class Agent:
    """Acts on conversations as an agent sees them: messages in, an answer out; knows no tokens."""

    def __init__(self) -> None:
        self.tree = Tree(PROMPT, HEARD)
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
            context = (*PROMPT[:2], *context) if family == 0 else context
        prompt = [*kept, *context]
        ids = [1000 * (len(self.tree.turns) + 1) + i for i in range(length)]
        added = self.tree.add(turn(parent, ids, heard=heard, context=() if parent == TASK_PROMPT else context, family=family))
        assert added.token_ids() == [*prompt, *ids], "what the engine was given and gave is the path, token for token"
        self.seen.append(((*messages, b"%d" % ids[0]), [*prompt, *ids]))

    def act(self, kind: str, which: int, length: int) -> None:
        past, ids = self.seen[which % len(self.seen)] if self.seen else (HEARD, list(PROMPT))
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
            self.call((*HEARD, self.word()), length)


@given(ACTIONS)
def test_any_agent_gets_token_exact_strands_that_train_each_turn_once(actions: list[tuple[str, int, int]]) -> None:
    agent = Agent()
    for action in actions:
        agent.act(*action)
    tree = agent.tree
    strands, abandoned = tree.strands()
    trained: Counter[int] = Counter(node.number for strand in strands for node in strand.nodes[-strand.num_own :])
    assert set(trained.values()) <= {1} and len(trained) + abandoned == len(tree.turns)
    whole = {tuple(ids) for _, ids in agent.seen}
    for index, strand in enumerate(strands):
        ids = strand.nodes[-1].token_ids()
        assert tuple(ids) in whole, "a strand is what an engine was given and gave"
        if strand.parent is not None:
            assert strand.parent < index
            assert ids[: strand.num_shared] == strands[strand.parent].nodes[-1].token_ids()[: strand.num_shared]
            assert strand.num_shared <= len(ids) - sum(len(node.own_ids) for node in strand.nodes[-strand.num_own :])
    continued = {node.parent.number for node in tree.turns if node.parent is not None}
    newest = {node.family: node.number for node in tree.turns}
    assert set(trained) == {node.number for node in tree.turns if node.number in continued or newest[node.family] == node.number}
    assert sum(strand.is_newest for strand in strands) == bool(tree.turns)
    for node in tree.turns:
        assert tree.deepest(fits_tokens(node.token_ids()))[1] == node.end
    written = [msgspec.msgpack.encode(node.turn) for node in tree.turns]
    assert told(grown(*(msgspec.msgpack.decode(one, type=Turn) for one in written))) == told(tree), "a journal gives it again"


def test_tokens_are_packed_without_loss() -> None:
    ids = [0, 1, 2**31 - 1]
    assert unpacked_ids(packed_ids(ids)) == tuple(ids)
    logprobs = [-0.1, -1e-300, float(np.float32(-0.3))]
    tokens = Tokens(packed_ids(ids), array("d", logprobs).tobytes(), (), LogprobMode.SAMPLED, "stop", "e")
    assert tokens.segment(Sampling()).logprobs == tuple(logprobs)
