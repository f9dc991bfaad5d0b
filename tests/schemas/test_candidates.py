"""Candidates as arrays and as bytes: nothing is lost between them, sizes that lie are refused, and so is what no sampler could say."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.errors import SchemaError
from streamrl.schemas.candidates import Candidates, CandidateSets, bounds_of, candidates_problem, joined, no_candidates

Rows = list[dict[int, float]]
rows = st.lists(st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-30, 0, width=32), max_size=5), max_size=6)


def sets(of: Rows, *, logprobs: bool = True) -> CandidateSets:
    pairs = [pair for row in of for pair in sorted(row.items())]
    found = np.array([value for _, value in pairs], np.float32) if logprobs else None
    return CandidateSets(bounds_of(np.array([len(row) for row in of])), np.array([key for key, _ in pairs], np.int32), found)


def plain(of: CandidateSets) -> Rows:
    values = np.zeros(len(of.ids), np.float32) if of.logprobs is None else of.logprobs
    places = [slice(a, b) for a, b in zip(of.bounds, of.bounds[1:], strict=False)]
    return [dict(zip(of.ids[place].tolist(), values[place].tolist(), strict=True)) for place in places]


@given(rows, st.booleans())
def test_bytes_say_what_arrays_do(of: Rows, logprobs: bool) -> None:
    made = Candidates.of(sets(of, logprobs=logprobs))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Candidates)
    assert plain(again.sets()) == plain(sets(of, logprobs=logprobs)) == plain(Candidates.from_texts(*made.texts()).sets())
    assert (again.sets().logprobs is not None) == (logprobs or not any(of))


@given(rows, st.data())
def test_parts_rows_and_joins_are_those_of_lists(of: Rows, data: st.DataObject) -> None:
    whole = sets(of)
    start = data.draw(st.integers(0, len(of)))
    stop = data.draw(st.integers(start, len(of)))
    assert plain(Candidates.of(whole).part(start, stop).sets()) == plain(sets(of[start:stop]))
    chosen = data.draw(st.lists(st.integers(-1, len(of) - 1), max_size=8))
    assert plain(whole.at(np.array(chosen, np.int64))) == plain(sets([{} if place < 0 else of[place] for place in chosen]))
    assert plain(joined([sets(of[:start]), no_candidates(2), sets(of[start:])])) == plain(sets([*of[:start], {}, {}, *of[start:]]))
    dropped = np.array(data.draw(st.lists(st.booleans(), min_size=len(of), max_size=len(of))), np.bool_)
    kept = [{} if drop else row for drop, row in zip(dropped, of, strict=True)]
    assert plain(whole.without(dropped)) == plain(sets(kept))


def u4(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


LIES = {
    "half a count": Candidates(b"\0\0", b""),
    "half an id": Candidates(u4(1), b"\0\0"),
    "a thousand million ids of which one is there": Candidates(u4(1_000_000_000), u4(1)),
    "counts that would come round to one": Candidates(u4(2**32 - 1, 2), u4(1)),
    "ids of nobody": Candidates(u4(0), u4(1)),
    "fewer log-probs": Candidates(u4(2), u4(1, 2), u4(0)),
    "log-probs alone": Candidates(u4(0), b"", u4(0)),
}


@pytest.mark.parametrize("said", LIES.values(), ids=LIES)
def test_sizes_that_lie_are_refused(said: Candidates) -> None:
    with pytest.raises(SchemaError, match="expected"):
        said.sets()


TOKENS, LOGPROBS, CUT = np.array([9, 4, 7], np.int32), np.log([1.0, 0.75, 0.25]).astype(np.float32), np.array([False, True, False])
GOOD: Rows = [{}, {4: np.log(0.75), 6: np.log(0.25)}, {2: np.log(0.5), 7: np.log(0.25)}]


def problem(of: CandidateSets, *, likely: bool = True, vocab_size: int = 10) -> str:
    return candidates_problem(of, TOKENS, LOGPROBS, CUT, vocab_size=vocab_size, likely=likely)


def test_log_probs_are_joined_where_all_have_them_and_noise_is_no_base64() -> None:
    some = sets([{3: -0.5}])
    assert joined([some, no_candidates(1)]).logprobs is not None
    assert joined([some, sets([{3: -0.5}], logprobs=False)]).logprobs is None
    with pytest.raises(SchemaError, match="base64"):
        Candidates.from_texts("!", "", "")
    assert problem(sets(GOOD)) == problem(sets(GOOD, logprobs=False), likely=False) == problem(no_candidates(3)) == ""


def changed(**arrays: np.ndarray) -> CandidateSets:
    return msgspec.structs.replace(sets(GOOD), **arrays)


WRONG = {
    "candidates of 3 tokens": sets(GOOD[:2]),
    "ids in 0 .. 9": changed(ids=np.array([4, 10, 2, 7], np.int32)),
    "got -1": changed(ids=np.array([-1, 4, 2, 7], np.int32)),
    "rising order": changed(ids=np.array([6, 4, 2, 7], np.int32)),
    "each once": changed(ids=np.array([4, 4, 2, 7], np.int32)),
    "token 1 that is not": changed(ids=np.array([5, 6, 2, 7], np.int32)),
    "token 2 that is not": changed(ids=np.array([4, 6, 2, 8], np.int32)),
    "log-probs of the candidates": sets(GOOD, logprobs=False),
    "finite log-probs": changed(logprobs=np.array([np.log(0.75), np.nan, -1, -1], np.float32)),
    "of at most 0": changed(logprobs=np.array([0.1, -9, np.log(0.5), np.log(0.25)], np.float32)),
    "add up to at most 1": changed(logprobs=np.array([np.log(0.75), np.log(0.25), np.log(0.9), np.log(0.25)], np.float32)),
    "and to 1 where": changed(logprobs=np.array([np.log(0.75), np.log(0.1), np.log(0.5), np.log(0.25)], np.float32)),
    "drawn with": changed(logprobs=np.array([np.log(0.7), np.log(0.3), np.log(0.5), np.log(0.25)], np.float32)),
}


@pytest.mark.parametrize(("said", "of"), WRONG.items(), ids=WRONG)
def test_what_no_sampler_says_is_named(said: str, of: CandidateSets) -> None:
    assert said in problem(of)
