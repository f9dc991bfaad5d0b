"""The fold's state: its encoding, and drops without number."""

from __future__ import annotations

import msgspec
import pytest

from streamrl.core.state import DROPS_CHUNK, FoldState
from streamrl.errors import SchemaError
from streamrl.schemas.ledger import Drop
from tests.core.stream import Stream, config, view


def test_state_survives_encoding() -> None:
    s = Stream(config(2, 2))
    s.group(4)
    s.group(1)
    s.train()
    s.rollouts(0, view(1, reward=None, oldest=1), group=3)
    s.end(0, 2, group=3)
    s.reward(2, 0, 0.5)
    s.group(3, oldest=1)
    s.end(5)
    state = FoldState.decode(s.state.encode())
    assert state == s.state and state.encode() == s.state.encode()
    assert state.pending[0].ended == (2,) and state.retired_above == frozenset({1, 4, 5})


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x81\xa7version\xa1x"])
def test_a_damaged_state_is_a_schema_error(data: bytes) -> None:
    with pytest.raises(SchemaError, match="fold state"):
        FoldState.decode(data)


@pytest.mark.parametrize("number", [0, 1, DROPS_CHUNK, DROPS_CHUNK + 1, 3 * DROPS_CHUNK, 5 * DROPS_CHUNK - 1])
def test_any_number_of_drops_is_kept_in_order(number: int) -> None:
    state = FoldState()
    for sequence in range(number):
        state = state.with_drop(Drop(sequence, 0, (), "late"))
    assert state.num_drops == number and len(state.newest_drops) <= DROPS_CHUNK
    assert [drop.sequence for drop in state.drops] == list(range(number))
    for after in (0, 1, DROPS_CHUNK - 1, DROPS_CHUNK, DROPS_CHUNK + 1, number - 1, number):
        assert state.drops_after(max(0, after)) == state.drops[max(0, after) :]
    assert FoldState.decode(state.encode()) == state


def test_a_state_of_before_drops_were_cut_into_chunks_is_read() -> None:
    drops = tuple(Drop(sequence, 0, (), "late") for sequence in range(2 * DROPS_CHUNK))
    state = FoldState.decode(msgspec.msgpack.encode({"cursor": 9, "drops": drops}))
    assert state.drops == drops
    assert state.with_drop(Drop(10**6, 0, (), "late")).drops == (*drops, Drop(10**6, 0, (), "late"))
