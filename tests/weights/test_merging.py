"""Merging version after version gives what merging each by itself gives, whatever has changed in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Contribution, Copying, Link, Manifest, PartRef
from streamrl.weights.merging import Merger
from streamrl.weights.ranks import RankContent, merge
from tests.weights.test_ranks import model, rows_of


def contributed(number: int, ranks: int) -> list[Contribution]:
    made = []
    for rank in range(ranks):
        content = RankContent(rows_of(model(number), rank, ranks))
        part = PartRef(f"v{number}.r{rank}", 0, content.nbytes, handle=b"%d" % rank, copying=Copying(number, 64, (content.nbytes,)))
        whole = Link(version=Version(0, number), parts=(part,))
        links = (whole,) if content.nbytes else ()
        named: dict[str, Any] = {"run": "r", "policy": "p", "version": Version(0, number), "transport": "ipc", "host": "h"}
        made.append(Contribution(slices=content.slices, links=links, **named))
    return made


def alone(contributions: Sequence[Contribution]) -> Manifest:
    return msgspec.structs.replace(merge(contributions), links={}, published_s=0.0)


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_versions_are_merged_as_each_by_itself(ranks: int) -> None:
    merger = Merger()
    for number in (1, 2, 3):
        contributions = contributed(number, ranks)
        assert msgspec.structs.replace(merger.merge(contributions), published_s=0.0) == alone(contributions)
    other = contributed(4, ranks + 1)
    assert msgspec.structs.replace(merger.merge(other), published_s=0.0) == alone(other)


def test_contributions_that_no_longer_fit_are_refused_as_they_were() -> None:
    merger = Merger()
    merger.merge(contributed(1, 2))
    first, second = contributed(2, 2)
    with pytest.raises(WeightSyncError, match="one run, policy, version"):
        merger.merge([first, msgspec.structs.replace(second, version=Version(0, 3))])
    with pytest.raises(WeightSyncError, match="slice"):
        merger.merge([first, msgspec.structs.replace(second, slices=second.slices[1:])])
    with pytest.raises(WeightSyncError):
        merger.merge([first])
    with pytest.raises(WeightSyncError, match="slices of every rank"):
        merger.merge([first, msgspec.structs.replace(second, links=())])
    crooked = msgspec.structs.replace(second.slices[0], digest="no digest here!!")
    with pytest.raises(WeightSyncError, match="digest of a slice"):
        merger.merge([first, msgspec.structs.replace(second, slices=(crooked, *second.slices[1:]))])
    assert merger.merge([first, second]).digest == alone([first, second]).digest
