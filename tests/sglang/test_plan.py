"""Plans as plain numbers: whatever the shapes and cuts, every element goes where it should, once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.engines.live_swap.plan import Copy, apart, canonical, cut, merge, windows


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, Copy]:
    """Elements of the source, and a copy of a rectangle of it into a 12 x 12 parameter, transposed or not."""
    height, width = draw(st.integers(1, 7)), draw(st.integers(1, 9))
    top, left = draw(st.integers(0, height - 1)), draw(st.integers(0, width - 1))
    rows, cols = draw(st.integers(1, height - top)), draw(st.integers(1, width - left))
    target = draw(st.integers(0, 2)) * 12 + draw(st.integers(0, 2))
    strides = draw(st.sampled_from([(12, 1), (1, 12)]))
    copy = canonical(0, 0, (rows, cols), (top * width + left, (width, 1)), (target, strides))
    assert copy is not None
    expected = {target + i * strides[0] + j * strides[1]: (top + i) * width + left + j for i in range(rows) for j in range(cols)}
    assert written(copy) == expected
    return height * width, copy


def written(copy: Copy) -> dict[int, int]:
    """Source element by target element."""
    return {
        copy.target + i * copy.target_stride + j * copy.target_step: copy.start + i * copy.stride + j
        for i in range(copy.rows)
        for j in range(copy.cols)
    }


@settings(max_examples=300, deadline=None)
@given(copies(), st.lists(st.integers(0, 63), max_size=3), st.sampled_from([2, 6, 20, 1000]), st.integers(1, 4))
def test_windows_bring_every_element_once(one, cuts, window_bytes, window_copies):
    elements, copy = one
    edges = sorted({0, elements, *(edge for edge in cuts if edge < elements)})
    sources = [(64 + 2 * a, 64 + 2 * b) for a, b in pairwise(edges)]
    found: dict[int, int] = {}
    last = (0, 0)
    for window in windows([copy], [64], [2], sources, window_bytes, window_copies):
        assert last <= (window.source, window.first_byte)
        last = (window.source, window.first_byte)
        assert len(window.pieces) <= window_copies
        assert window.end_byte - window.first_byte <= window_bytes
        for piece in window.pieces:
            assert window.first_byte <= piece.first_byte < piece.end_byte <= window.end_byte
            assert sources[piece.source][0] <= piece.first_byte
            assert piece.end_byte <= sources[piece.source][1]
            part = written(piece.copy)
            assert not part.keys() & found.keys()
            found |= part
    assert found == written(copy)


@settings(max_examples=200, deadline=None)
@given(copies(), st.integers(0, 70), st.integers(0, 70))
def test_cut_takes_what_lies_between(one, first, end):
    _, copy = one
    found: dict[int, int] = {}
    for part in cut(copy, first, end):
        found |= written(part)
    assert found == {target: source for target, source in written(copy).items() if first <= source < end}


@settings(max_examples=300, deadline=None)
@given(copies(), copies())
def test_apart_is_never_wrong(one, other):
    if apart(one[1], other[1]):
        assert not written(one[1]).keys() & written(other[1]).keys()


def test_neighbours_become_one_copy():
    gate = Copy(3, 0, 8, 1, 8, 5, 100, 8)
    up = Copy(3, 8, 8, 1, 8, 5, 108, 8)
    elsewhere = Copy(3, 16, 8, 1, 8, 5, 200, 8)
    assert merge([elsewhere, up, gate]) == [Copy(3, 0, 16, 1, 16, 5, 100, 16), elsewhere]


def test_what_is_no_rows_of_elements_is_refused():
    assert canonical(0, 0, (2, 2, 2), (0, (100, 10, 1)), (0, (4, 2, 1))) is None
    assert canonical(0, 0, (4,), (0, (0,)), (0, (1,))) is None


def test_large_copies_are_cut_to_windows():
    copy = Copy(0, 0, 1 << 20, 1, 1 << 20, 0, 0, 1 << 20)
    found = windows([copy], [0], [2], [(0, 2 << 20)], 1 << 16)
    assert len(found) == 32
    assert sum(window.nbytes for window in found) == 2 << 20
    assert np.all(np.diff([window.first_byte for window in found]) == 1 << 16)
