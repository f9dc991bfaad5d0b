from __future__ import annotations

from streamrl.consumers.training.divergence import MOST, Divergence
from streamrl.errors import WeightsDiverged
from streamrl.schemas.versions import Version
from tests.support.errors import raises


def test_many_batches_in_a_row_are_a_divergence_and_single_ones_are_not() -> None:
    divergence = Divergence()
    for number in range(1, 4 * MOST):
        divergence.check(Version(0, number), finite=number % MOST == 0)
    divergence.check(Version(0, 100), finite=True)
    for number in range(101, 100 + MOST):
        divergence.check(Version(0, number), finite=False)
    with raises(WeightsDiverged, version=f"0.{100 + MOST}"):
        divergence.check(Version(0, 100 + MOST), finite=False)
