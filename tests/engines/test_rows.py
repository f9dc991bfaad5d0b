"""The running batch against a plain dictionary: whoever joins keeps its own state wherever its row moves."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamrl.engines.batching.rows import Rows
from streamrl.engines.lost import Lost
from streamrl.engines.protocol import GenerateRequest
from streamrl.engines.requests import Completion, Job
from streamrl.schemas.samples import VersionSpan
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version

SLOTS = 5


def a_completion(seed: int) -> Completion:
    request = GenerateRequest(
        request_id=f"r{seed}",
        prompt_ids=(seed + 1,) * (1 + seed % 3),
        seeds=(seed,),
        sampling=Sampling(stop_token_ids=(1000 + seed,) * (seed % 4)),
    )
    return Job(request, eos_ids=(), max_len=64, lost=Lost(), editors=[None]).completions[0]


@settings(max_examples=150, deadline=None)
@example([(1, set(), False), (1, set(), True), (0, {0}, False), (0, {0}, False)])
@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, SLOTS - 1)), st.booleans()), max_size=25))
def test_joins_leaves_and_moves_keep_every_completions_state(plan):
    """Each round: some leave, some join, the holes are closed, everyone gets a token that names it, sometimes the version changes."""
    rows = Rows(SLOTS, 64)
    expected: dict[int, list[int]] = {}
    versions: dict[int, list[int]] = {}
    cache = np.full(SLOTS, -1)
    made = number = 0
    for joining, leaving, swapping in plan:
        if swapping:
            number += 1
            rows.mark(Version(0, number))
        for row in sorted(leaving):
            owner = rows.owners[row]
            if row < rows.count and owner is not None:
                seed = owner.job.seeds[0]
                spans = rows.spans(row, 0, int(rows.drawn[row]))
                assert rows.out_ids[row, : rows.drawn[row]].tolist() == expected.pop(seed)
                assert [span.version.number for span in spans if span.version is not None for _ in range(span.length)] == versions.pop(seed)
                rows.leave(row)
        joiners = [a_completion(made + k) for k in range(min(joining, SLOTS - rows.running))]
        made += len(joiners)
        if joiners:
            taken = rows.take(joiners, Version(0, number))
            cache[taken] = [joiner.job.seeds[0] for joiner in joiners]
            for joiner in joiners:
                expected[joiner.job.seeds[0]], versions[joiner.job.seeds[0]] = [], []
        targets, sources = rows.compact()
        assert not set(targets) & set(sources)
        cache[targets] = cache[sources]
        assert rows.count == rows.running == len(expected)
        for row in range(rows.count):
            owner = rows.owners[row]
            assert owner is not None and owner.row == row
            seed = owner.job.seeds[0]
            assert cache[row] == seed == rows.seeds[row], "the model's row moved with its completion"
            assert rows.positions[row] == len(owner.job.prompt) - 1 + len(expected[seed])
            assert set(rows.stops[row].tolist()) - {-1} == set(owner.job.stops)
            expected[seed].append(seed + 7)
            versions[seed].append(number)
        if rows.count:
            index = rows.index(rows.count)
            rows.append(index, rows.seeds[: rows.count].astype(np.int64) + 7, np.zeros(rows.count, np.float32))


def test_spans_of_a_part_are_cut_from_the_whole():
    rows = Rows(1, 32)
    rows.take([a_completion(0)], Version(0, 0))
    for number, tokens in ((0, 3), (1, 0), (2, 4), (3, 2)):
        if number:
            rows.mark(Version(0, number))
        for _ in range(tokens):
            rows.append(rows.index(1), np.array([5]), np.zeros(1, np.float32))
    assert rows.spans(0, 0, 9) == (VersionSpan(3, Version(0, 0)), VersionSpan(4, Version(0, 2)), VersionSpan(2, Version(0, 3)))
    assert rows.spans(0, 2, 4) == (VersionSpan(1, Version(0, 0)), VersionSpan(1, Version(0, 2)))
    assert rows.spans(0, 4, 4) == ()
