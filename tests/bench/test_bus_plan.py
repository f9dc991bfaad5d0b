from __future__ import annotations

import pytest

from benchmarks.bus.plan import BusOptions, Cell, Transport
from benchmarks.names import names, numbers
from benchmarks.report import turn
from streamrl.errors import ConfigError
from tests.support.errors import raises


def test_numbers_and_names_are_parsed() -> None:
    assert numbers("--tokens", "256, 2k,16k,2048") == (256, 2048, 16384)
    assert names("--transports", "", Transport) == tuple(Transport)
    assert names("--transports", "ray,streamrl,ray", Transport) == (Transport.RAY, Transport.STREAMRL)
    assert [Cell(8, tokens).name for tokens in (256, 2048, 1500)] == ["8 x 256", "8 x 2k", "8 x 1500"]
    assert [Cell.named(Cell(8, tokens).name) for tokens in (256, 2048, 1500)] == [Cell(8, 256), Cell(8, 2048), Cell(8, 1500)]


@pytest.mark.parametrize("text", ["2.5k", "x", "-1", "2kk"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with raises(ConfigError, option="--tokens", got=text):
        numbers("--tokens", text)


def test_an_unknown_transport_is_refused() -> None:
    with raises(ConfigError, option="--transports", got="kafka"):
        names("--transports", "streamrl,kafka", Transport)


def test_a_round_sends_about_as_many_tokens_of_every_shape() -> None:
    options = BusOptions(round_tokens=1_000_000, min_tasks=3, max_tasks=1000)
    assert options.num_tasks(Cell(1, 256)) == 1000
    assert options.num_tasks(Cell(8, 2048)) == 61
    assert options.num_tasks(Cell(64, 16384)) == 3


def test_no_transport_always_comes_after_the_same_one_at_the_start() -> None:
    three = [Transport.STREAMRL, Transport.RAY, Transport.ZMQ_MSGPACK]
    assert [turn(three, number)[0] for number in range(4)] == [*three, Transport.STREAMRL]
    assert all(sorted(turn(three, number)) == sorted(three) for number in range(3))
