"""From a packed batch to the rectangles of tokens that a model is run on. Pure, deterministic, numpy only.

Letters: `T` tokens of the batch, `R` rows of a micro-batch, `L` its row length, `M` its predicted tokens.

A *tree* is what is laid out in one piece: one sample, or neighbouring samples of one task with their common prefix laid
out once and one branch for the rest of each (a group shares its prompt: with short answers that leaves a third of the
tokens). A row holds one or several trees. A token may look at earlier tokens of its row that belong to its tree and lie
in the shared prefix or in its own branch, which is exactly what it would see in its sample alone.

Where `row_length` is given, a micro-batch is one *packed* row of exactly that length: whole samples one behind another, nothing shared, and
`starts` says where each begins. All shapes of a run are then the same, so that a model can be compiled once.

Rows are otherwise as long as the longest tree of their micro-batch; trees are placed longest first, each into the row with the
least room that still takes it (best-fit decreasing).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from streamrl.core.balance import sequence_cost
from streamrl.core.batches import TrainBatch, samples_at
from streamrl.errors import TrainingError

Indices = npt.NDArray[np.int64]
ROW = 8192
"""Positions of a short packed row: enough for the matrix products. Longer ones keep more activations at a time."""


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Of a packed row that several ranks share (`streamrl.core.context`): what one rank's two chunks of queries look at."""

    queries: npt.NDArray[np.int32]
    """[2, B] for each chunk, where its pieces begin, and its length."""
    keys: npt.NDArray[np.int32]
    """[2, B] for each chunk, where the keys of its pieces begin in the row, and the row's length."""
    order: Indices
    """[2 N] which of the chunks that all ranks hold, rank by rank, is each chunk of the row."""


class MicroBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of one forward pass, and which of its states predict which tokens of the batch."""

    inputs: Indices
    """[R, L] token ids; 0 at the padding, which stands at the ends of rows."""
    positions: Indices
    """[R, L] position of each token in its own sample; 0 at the padding, which may be longer than any sample."""
    tree: npt.NDArray[np.int32]
    """[R, L] number of the token's tree within its row; padding continues with the last one, later than all of it."""
    branch: npt.NDArray[np.int32]
    """[R, L] branch within its tree, from 1; 0 for the shared prefix."""
    copies: npt.NDArray[np.int32]
    """[R, L] samples that the token stands for: several where a prompt is shared, 0 at the padding."""
    fed: Indices
    """[R, L] the token's index in the batch, that of the first sample where a prompt is shared; -1 at the padding."""
    source: Indices
    """[M] flat index (row * L + column) of the state that predicts the token."""
    target: Indices
    """[M] the predicted token's index in the batch."""
    plain: bool
    """True when each row holds one sample: then causal attention needs no further mask, and positions count from 0."""
    starts: npt.NDArray[np.int32] | None = None
    """Of a packed row: [S + 2] columns at which its samples and the padding begin, then L; padding of several times `longest` is cut into
    as many samples. None: no packed row."""
    longest: int = 0
    """Of a packed row: no sample of the batch is longer; one of few numbers."""
    cut: Cut | None = None
    """Of a rank's part of a packed row; its columns are no longer neighbours then, and `starts` are still those of the row."""


class Tree(msgspec.Struct, frozen=True):
    """Samples laid out together: the first `prefix` inputs of all are the same and stand there once.

    Example: two samples of 6 and 5 tokens share a prompt of 3; the last token of a sample is predicted and never fed.

        >>> Tree(samples=(0, 1), inputs=(5, 4), prefix=3).length
        6
    """

    samples: tuple[int, ...]
    inputs: tuple[int, ...]
    """For each sample, how many of its tokens are fed to the model (up to the one before the last predicted)."""
    prefix: int

    @property
    def length(self) -> int:
        """Row positions it takes."""
        return self.prefix + sum(n - self.prefix for n in self.inputs)


def plan_micro_batches(
    batch: TrainBatch,
    predicted: npt.NDArray[np.bool_],
    samples: Indices,
    *,
    budget: int,
    share_prefixes: bool = True,
    several_per_row: bool = True,
    row_length: int = 0,
    width: int = 1024,
    rank: int = 0,
    ranks: int = 1,
) -> list[MicroBatch]:
    """Cut the samples into micro-batches so that each predicted token is predicted exactly once.

    Args:
        batch: the whole batch.
        predicted: [T] which tokens are wanted; never a sequence's first.
        samples: indices of the samples to lay out, ascending. Those without a predicted token are left out.
        budget: most row positions (R * L) of a micro-batch. A single tree that is longer gets one of its own.
        share_prefixes: lay a group's common prefix out once, where that is cheaper and fits the budget.
        several_per_row: let a row hold several trees. False for models that cannot be masked freely.
        row_length: of packed rows, see `packed_row_length`; 0: rows are laid out by the other arguments.
        width: hidden size of the model, which weighs its linear layers against attention.
        rank: whose share of the packed rows is laid out; rows of other kinds are shared out before, see `split_ranks`.
        ranks: how many share them.

    Returns:
        Micro-batches, those with long rows first; none when nothing is predicted.

    Raises:
        TrainingError: a sample is longer than `row_length`.
    """
    if row_length:
        rows = _packed_rows(batch, predicted, samples, row_length)
        longest = packed_row_length(batch, row_length)
        return [_packed(batch, predicted, row, row_length, longest) for row in _shares(rows, ranks, width)[rank]]
    trees = _trees(batch, predicted, samples, share_prefixes, budget, width)
    left = sorted(trees, key=lambda tree: (-tree.length, tree.samples))
    plans: list[MicroBatch] = []
    while left:
        rows, left = _fill_rows(left, budget, several_per_row)
        plans.append(_lay_out(batch, predicted, rows))
    return plans


def empty_micro_batch(batch: TrainBatch, row_length: int = 0) -> MicroBatch:
    """One that predicts nothing: a row of one token, or a packed one of `row_length`, as the batch's others are."""
    if not row_length:
        return _padding(1)
    longest = packed_row_length(batch, row_length)
    starts = np.array([*range(0, row_length, longest), row_length], np.int32)
    return replace(_padding(row_length), plain=False, starts=starts, longest=longest)


def trial_row(row_length: int) -> MicroBatch:
    """A packed row of nothing but zeros, laid out as a batch's rows are, that predicts nothing."""
    longest = min(row_length, ROW)
    starts = np.array([0, *range(longest, row_length, longest), row_length, row_length], np.int32)
    # Not `[None]`, whose first stride is 0: compiled code would be compiled again for the strides of a batch's rows.
    positions = np.arange(row_length, dtype=np.int64).reshape(1, row_length)
    return replace(_padding(row_length), positions=positions, plain=False, starts=starts, longest=longest)


def _padding(length: int) -> MicroBatch:
    """A row of it, [1, length], that predicts nothing."""
    shape, nothing = (1, length), np.zeros(0, np.int64)
    return MicroBatch(
        inputs=np.zeros(shape, np.int64),
        positions=np.zeros(shape, np.int64),
        tree=np.zeros(shape, np.int32),
        branch=np.ones(shape, np.int32),
        copies=np.zeros(shape, np.int32),
        fed=np.full(shape, -1, np.int64),
        source=nothing,
        target=nothing,
        plain=True,
    )


def split_groups(batch: TrainBatch, parts: int) -> list[Indices]:
    """Samples of each optimizer step: whole groups, in order, in `parts` nearly equal parts (fewer if there are fewer groups)."""
    starts = np.flatnonzero(np.diff(batch.tasks, prepend=batch.tasks[:1] - 1))
    bounds = [int(chunk[0]) for chunk in np.array_split(starts, min(parts, len(starts)))]
    return [np.arange(a, b, dtype=np.int64) for a, b in zip(bounds, [*bounds[1:], batch.num_samples], strict=True)]


def packed_row_length(batch: TrainBatch, budget: int, least: int = ROW) -> int:
    """Length of all packed rows of a batch: `least`, or the power of two that holds its longest sample, but not above the budget.

    Where a sample is longer than the budget it is that sample's length, rounded up to one of eight lengths from each power of two to the
    next. A length that has not been there before is compiled anew, so there must be few.

    Example: with a budget of 16,384, longest samples of 700, 9,000 and 17,000 tokens give rows of 8,192, 16,384 and 18,432.
    """
    longest = int(batch.lengths.max(initial=1))
    if longest <= budget:
        return min(budget, max(least, 1 << (longest - 1).bit_length()))
    unit = 1 << max(0, longest.bit_length() - 4)
    return -(-longest // unit) * unit


def _trees(batch: TrainBatch, predicted: npt.NDArray[np.bool_], samples: Indices, share: bool, budget: int, width: int) -> list[Tree]:
    # The last predicted token of a sample is the last thing it needs; what it is fed ends one before.
    ends = np.full(batch.num_samples, -1, np.int64)
    wanted = np.flatnonzero(predicted)
    ends[samples_at(batch, wanted)] = wanted  # ascending, so the last one of each sample stays
    fed = (ends - batch.offsets[:-1])[samples]
    used, fed = samples[fed > 0], fed[fed > 0]
    cuts = np.flatnonzero(np.diff(batch.tasks[used])) + 1
    trees: list[Tree] = []
    for group, lengths in zip(np.split(used, cuts), np.split(fed, cuts), strict=True):
        if len(group) > 1 and share:
            prefix = _common_prefix(batch, group, int(lengths.min()))
            tree = Tree(tuple(group.tolist()), tuple(lengths.tolist()), prefix)
            if prefix and tree.length <= budget and sequence_cost(tree.length, width) < sum(sequence_cost(n, width) for n in tree.inputs):
                trees.append(tree)
                continue
        trees.extend(Tree((sample,), (length,), 0) for sample, length in zip(group.tolist(), lengths.tolist(), strict=True))
    return trees


def _packed_rows(batch: TrainBatch, predicted: npt.NDArray[np.bool_], samples: Indices, length: int) -> list[list[Tree]]:
    """Samples row by row, by best-fit decreasing over all of them: over a step of many rows that leaves hardly anything empty."""
    trees = sorted(_trees(batch, predicted, samples, False, length, 0), key=lambda tree: (-tree.length, tree.samples))
    if trees and trees[0].length > length:
        raise TrainingError(
            f"expected samples of at most {length} tokens, which a packed row holds, got one of {trees[0].length}",
            expected=length,
            got=trees[0].length,
        )
    rows: list[list[Tree]] = []
    room: list[tuple[int, int]] = []
    for tree in trees:
        best = bisect_left(room, (tree.length, 0))
        free, row = room.pop(best) if best < len(room) else (length, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(tree)
        insort(room, (free - tree.length, row))
    return rows


def _shares(rows: Sequence[list[Tree]], ranks: int, width: int) -> list[list[list[Tree]]]:
    """The rows of each rank: as many for each, up to one, and nearly the same work. A rank's rows stand in the order they came in.

    Of every `ranks` rows, from the costliest on, the rank that has the least so far gets the costliest.
    """
    costs = [sum(sequence_cost(tree.length, width) for tree in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda row: (-costs[row], row))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    work = [0] * ranks
    for first in range(0, len(rows), ranks):
        poorest = sorted(range(ranks), key=lambda rank: (work[rank], rank))
        for row, rank in zip(order[first : first + ranks], poorest, strict=False):
            shares[rank].append(row)
            work[rank] += costs[row]
    return [[rows[row] for row in sorted(share)] for share in shares]


def _packed(batch: TrainBatch, predicted: npt.NDArray[np.bool_], row: list[Tree], length: int, longest: int) -> MicroBatch:
    """One packed row; see `MicroBatch.starts`.

    Example: samples of 3 and 2 fed tokens in a row of 8 give starts 0 3 5 8; the padding is the last sample, of a full row an empty one.
    Where no sample is longer than 2 they are 0 2 4 6 8 for samples of 2 and 2.
    """
    ends = np.cumsum([0, *(tree.length for tree in row)])
    padding = np.arange(ends[-1], length, longest)
    starts = np.array([*ends, *padding[1:], length], np.int32)
    return replace(_lay_out(batch, predicted, [row], length), plain=False, starts=starts, longest=longest)


def _common_prefix(batch: TrainBatch, samples: Indices, limit: int) -> int:
    """Tokens that are the same in all of them, and went to the same experts where that is known."""
    places = batch.offsets[samples][:, None] + np.arange(limit)[None, :]
    grid = batch.tokens[places]
    differs = (grid != grid[:1]).any(axis=0)
    if batch.routed_experts is not None:
        routed = batch.routed_experts[places]
        differs |= (routed != routed[:1]).any(axis=(0, 2, 3))
    return int(differs.argmax()) if differs.any() else limit


def _fill_rows(trees: Sequence[Tree], budget: int, several: bool) -> tuple[list[list[Tree]], list[Tree]]:
    """Rows of one micro-batch from trees sorted by falling length, and the trees that did not fit."""
    capacity = trees[0].length
    most = max(1, budget // capacity)
    rows: list[list[Tree]] = []
    room: list[tuple[int, int]] = []
    left: list[Tree] = []
    for tree in trees:
        best = bisect_left(room, (tree.length, 0))
        if several and best < len(room):
            free, row = room.pop(best)
            rows[row].append(tree)
            insort(room, (free - tree.length, row))
        elif len(rows) < most:
            rows.append([tree])
            insort(room, (capacity - tree.length, len(rows) - 1))
        else:
            left.append(tree)
    return rows, left


def _lay_out(batch: TrainBatch, predicted: npt.NDArray[np.bool_], rows: Sequence[Sequence[Tree]], length: int = 0) -> MicroBatch:
    """The arrays of `MicroBatch` for rows of trees, `length` positions long (0: as the first tree).

    Example: samples 0 = p q r a b and 1 = p q r c d e of one task, trained on what follows the prompt p q r. Fed are all but the last
    tokens, the prompt once (prefix = 3), then the branch of each:

        column      0  1  2 | 3 | 4  5
        inputs      p  q  r | a | c  d
        positions   0  1  2 | 3 | 3  4
        branch      0  0  0 | 1 | 2  2
        copies      2  2  2 | 1 | 1  1

    State k of a sample predicts its token k + 1. States 0 .. prefix - 1 stand at the tree's beginning for every sample; state k >= prefix
    of a later branch stands at `column - skip + k`, where `column` is where the branch begins and `skip` the prefix that is not repeated.
    So a and c are both predicted by column 2, b by column 3, d by column 4 - 3 + 3 = 4 and e by column 5:

        source      2  3 | 2  4  5
        target      3  4 | 8  9 10      (tokens of the batch: sample 1 begins at 5)
    """
    shape = (len(rows), length or rows[0][0].length)
    inputs, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    trees, branches, copies = (np.zeros(shape, np.int32) for _ in range(3))
    origins = np.full(shape, -1, np.int64)
    sources: list[Indices] = []
    targets: list[Indices] = []
    for r, row in enumerate(rows):
        column = 0
        for t, tree in enumerate(row):
            begin, prefix = column, tree.prefix
            for b, (sample, fed) in enumerate(zip(tree.samples, tree.inputs, strict=True)):
                skip = prefix if b else 0  # the prefix stands there once, before the first branch
                first = int(batch.offsets[sample])
                stop = column + fed - skip
                positions[r, column:stop] = np.arange(skip, fed)
                origins[r, column:stop] = first + positions[r, column:stop]
                inputs[r, column:stop] = batch.tokens[first + skip : first + fed]
                branches[r, column:stop] = b + 1
                copies[r, column:stop] = 1
                # State k of the sample predicts its token k + 1; states of the prefix stand at the tree's beginning.
                states = np.flatnonzero(predicted[first + 1 : first + fed + 1])
                sources.append(r * shape[1] + np.where(states < prefix, begin + states, column - skip + states))
                targets.append(first + 1 + states)
                column = stop
            branches[r, begin : begin + prefix] = 0
            copies[r, begin : begin + prefix] = len(tree.samples)
            trees[r, begin:] = t
        branches[r, column:] = branches[r, column - 1]
    plain = all(len(row) == 1 and len(row[0].samples) == 1 for row in rows)
    return MicroBatch(
        inputs=inputs,
        positions=positions,
        tree=trees,
        branch=branches,
        copies=copies,
        fed=origins,
        source=np.concatenate(sources),
        target=np.concatenate(targets),
        plain=plain,
    )
