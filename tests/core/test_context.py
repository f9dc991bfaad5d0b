"""How ranks share a packed row: arithmetic."""

from itertools import pairwise

import numpy as np
import pytest

from streamrl.core.context import pair_chunks, share_row
from streamrl.core.packing import MicroBatch, empty_micro_batch, plan_micro_batches
from tests.support.batches import train_batch


def row(lengths: list[int], length: int) -> MicroBatch:
    """A packed row of samples that are fed so many tokens; every token but a sample's first is predicted."""
    rng = np.random.default_rng(0)
    batch = train_batch([{"prompt": [1], "answer": rng.integers(2, 16, fed).tolist()} for fed in lengths])
    (micro,) = plan_micro_batches(batch, batch.loss_mask, np.arange(len(lengths)), budget=length, row_length=length)
    return micro


def looks_at(micro: MicroBatch) -> set[tuple[int, int]]:
    """Pairs (query, key) of columns of a row that causal attention within samples has."""
    assert micro.starts is not None
    bounds = list(zip(micro.starts[:-1].tolist(), micro.starts[1:].tolist(), strict=True))
    return {(query, key) for first, last in bounds for query in range(first, last) for key in range(first, query + 1)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[24], [17, 5], [3, 9, 2, 4, 1], [12, 12], [1]])
def test_the_ranks_queries_look_at_what_the_row_alone_does(ranks: int, lengths: list[int]) -> None:
    length = 24
    micro, chunk = row(lengths, length), length // (2 * ranks)
    found: list[tuple[int, int]] = []
    columns_of_all: list[int] = []
    for place in range(ranks):
        held = share_row(micro, place, ranks).micro
        cut = held.cut
        assert cut is not None and held.inputs.shape == (1, 2 * chunk)
        # Chunk c of the row is number order[c] of the chunks that the ranks hold one behind another.
        columns = [int(np.flatnonzero(cut.order == 2 * place + half)[0]) * chunk + c for half in (0, 1) for c in range(chunk)]
        columns_of_all += columns
        assert held.inputs[0].tolist() == micro.inputs[0, columns].tolist()
        assert held.positions[0].tolist() == micro.positions[0, columns].tolist()
        for half in (0, 1):
            queries, keys = cut.queries[half], cut.keys[half]
            assert queries[0] == keys[0] == 0 and queries[-1] == chunk and keys[-1] == length
            assert (np.diff(queries) >= 0).all() and (np.diff(keys) >= 0).all()
            assert np.diff(keys).max() <= micro.longest
            for (a, b), (first, last) in zip(pairwise(queries), pairwise(keys), strict=True):
                # The last query's last key is the last one.
                pairs = [(columns[half * chunk + q], k) for q in range(a, b) for k in range(first, last - (b - 1 - q))]
                found += pairs
    assert sorted(columns_of_all) == list(range(length))
    assert len(found) == len(set(found)) and set(found) == looks_at(micro)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lengths", [[24], [3, 9, 2, 4, 1], [1]])
def test_each_token_is_predicted_by_one_rank_and_found_again(ranks: int, lengths: list[int]) -> None:
    micro = row(lengths, 24)
    shares = [share_row(micro, place, ranks) for place in range(ranks)]
    most = shares[0].most
    table = np.full(ranks * most, -1)
    for place, share in enumerate(shares):
        assert share.most == most and share.places.tolist() == shares[0].places.tolist()
        table[place * most : place * most + len(share.micro.target)] = share.micro.target
        # The state that predicts a token is the same token's, at the same position.
        of_target = dict(zip(micro.target.tolist(), micro.source.tolist(), strict=True))
        for source, target in zip(share.micro.source, share.micro.target, strict=True):
            assert share.micro.inputs[0, source] == micro.inputs[0, of_target[int(target)]]
            assert share.micro.positions[0, source] == micro.positions[0, of_target[int(target)]]
    assert table[shares[0].places].tolist() == micro.target.tolist()


def test_an_empty_row_is_shared_too() -> None:
    micro = empty_micro_batch(train_batch([{"prompt": [1], "answer": [2, 3]}]), 16)
    share = share_row(micro, 1, 2)
    assert share.most == 1 and len(share.micro.target) == len(share.places) == 0
    assert share.micro.inputs.shape == (1, 8)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_shared_evenly(ranks: int) -> None:
    """Of one sample exactly; of several to one chunk's work, and never worse than chunks i and 2 N - 1 - i."""
    length = 64 * ranks
    for lengths in ([length], [length // 2 + 3, length // 4], [length * 3 // 4], [5] * (length // 6)):
        micro = row(lengths, length)
        assert micro.starts is not None
        keys = np.concatenate([np.arange(1, size + 1) for size in np.diff(micro.starts)]).reshape(2 * ranks, -1).sum(1)
        work = keys[pair_chunks(micro.starts, ranks)].sum(1)
        fixed = keys[[[rank, 2 * ranks - 1 - rank] for rank in range(ranks)]].sum(1)
        assert work.max() - work.min() <= keys.max()
        assert work.max() <= fixed.max()
        if lengths == [length]:
            assert work.max() == work.min()
