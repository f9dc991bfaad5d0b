"""Following a copy on another process's device: what is waited for, and what is refused."""

import pytest

from streamrl.errors import WeightSyncError
from streamrl.schemas.weights import Copying
from streamrl.tensors.buckets import Buckets, check_copying
from tests.support.errors import raises

COPYING = Copying(stamp=5, at=64, ends=(10, 30, 40))


def test_bytes_are_waited_for_bucket_by_bucket() -> None:
    seen = iter([[3, 0, 0], [5, 3, 0], [5, 3, 0], [5, 5, 3], [5, 5, 5]])
    looks: list[int] = []

    def look() -> list[int]:
        looks.append(len(looks))
        return next(seen)

    buckets = Buckets(COPYING, look, where="v")
    buckets.wait(0)
    assert looks == []
    buckets.wait(1)
    buckets.wait(10)
    assert len(looks) == 2
    buckets.wait(11)
    buckets.wait(30)
    assert len(looks) == 4
    buckets.wait(40)
    buckets.wait(5)
    assert len(looks) == 5


def test_marks_of_a_newer_version_mean_that_this_one_is_gone() -> None:
    with raises(WeightSyncError, taken_back="v"):
        Buckets(COPYING, lambda: [6, 5, 5], where="v").wait(40)


def test_a_copy_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.tensors.buckets.PATIENCE_S", 0.02)
    with raises(WeightSyncError, buckets=1):
        Buckets(COPYING, lambda: [5, 4, 4], where="v").wait(40)


@pytest.mark.parametrize(
    "enemy",
    [
        Copying(5, 64, ()),
        Copying(5, 64, (10, 30)),
        Copying(5, 64, (10, 30, 41)),
        Copying(5, 64, (10, 10, 40)),
        Copying(5, 64, (30, 10, 40)),
        Copying(5, 64, (-1, 40)),
        Copying(5, 64, (0, 40)),
        Copying(5, 65, (40,)),
        Copying(5, 32, (40,)),
        Copying(5, -8, (40,)),
        Copying(0, 64, (40,)),
    ],
)
def test_buckets_that_do_not_make_up_the_buffer_are_refused(enemy: Copying) -> None:
    check_copying(COPYING, 40, where="v")
    with raises(WeightSyncError, expected=40):
        check_copying(enemy, 40, where="v")


def test_there_is_a_bound_to_buckets() -> None:
    check_copying(Copying(1, 8192, tuple(range(1, 4097))), 4096, where="v")
    with raises(WeightSyncError, buckets=4097):
        check_copying(Copying(1, 8192, tuple(range(1, 4098))), 4097, where="v")
