"""Which way leads to a version, when there is an anchor, and which bytes must stay: pure functions."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Link, PartRef
from streamrl.weights.links import BlobName, anchor_due, needed, routes, window
from tests.support.errors import raises

WHOLE, CHANGES = 1000, 30


def link(number: int, parent: int | None = None, nbytes: int = 0) -> Link:
    size = nbytes or (WHOLE if parent is None else CHANGES)
    return Link(
        version=Version(0, number),
        parent=None if parent is None else Version(0, parent),
        parts=(PartRef(location=f"{number}-{parent}", offset=0, nbytes=size),),
    )


def run(count: int, every: int) -> list[Link]:
    """What a publisher stores for versions 0 to count - 1: an anchor has its delta too, but for the first."""
    links: list[Link] = []
    for number in range(count):
        due = anchor_due(links, CHANGES, WHOLE, every)
        links += [link(number)] if due else []
        links += [link(number, number - 1)] if number else []
    return links


def numbers(way: tuple[Link, ...]) -> list[tuple[int, int | None]]:
    return [(one.version.number, None if one.parent is None else one.parent.number) for one in way]


def test_a_late_joiner_begins_with_the_newest_anchor_and_a_follower_with_what_it_holds():
    links = run(7, 4)
    assert [numbers(way) for way in routes(links, Version(0, 6))] == [
        [(4, None), (5, 4), (6, 5)],
        [(0, None), *((n, n - 1) for n in range(1, 7))],
    ]
    assert numbers(routes(links, Version(0, 6), Version(0, 5))[0]) == [(6, 5)]
    assert numbers(routes(links, Version(0, 6), Version(0, 2))[0]) == [(3, 2), (4, 3), (5, 4), (6, 5)]
    assert numbers(routes(links, Version(0, 6), Version(1, 0))[0]) == [(4, None), (5, 4), (6, 5)]
    assert routes(links, Version(0, 6), Version(0, 6)) == ((),)


def test_the_way_with_the_fewest_bytes_comes_first():
    links = [link(0), link(1, 0, nbytes=900), link(2), link(2, 1, nbytes=900)]
    assert numbers(routes(links, Version(0, 2), Version(0, 0))[0]) == [(2, None)]
    assert numbers(routes(links, Version(0, 2), Version(0, 1))[0]) == [(2, 1)]


def test_links_that_lead_nowhere_are_refused():
    with raises(WeightSyncError, version="0.2") as caught:
        routes([link(2, 1)], Version(0, 2))
    assert "anchor" in caught.value.hint
    with raises(WeightSyncError, version="0.2", parent="0.3"):
        routes([link(2, 3), link(3, 2)], Version(0, 2))


@settings(max_examples=80, deadline=None)
@given(count=st.integers(1, 60), every=st.integers(1, 20))
def test_an_anchor_comes_at_the_latest_every_so_many_versions_and_its_window_serves_everybody(count, every):
    links = run(count, every)
    anchors = [one.version.number for one in links if one.parent is None]
    assert anchors == list(range(0, count, every))
    newest = Version(0, count - 1)
    shown = window(links)
    [joiner, *_] = routes(shown, newest)
    assert joiner[0].version.number == anchors[-1] and len(joiner) <= every
    last_but_one = anchors[-2] if len(anchors) > 1 else anchors[-1]
    for held in range(last_but_one, count - 1):
        assert any(numbers(way) == [(n, n - 1) for n in range(held + 1, count)] for way in routes(shown, newest, Version(0, held)))


def test_an_anchor_comes_sooner_when_the_changes_add_up_to_a_version():
    links = [link(0), link(1, 0, 600)]
    assert not anchor_due(links, 399, WHOLE, 100)
    assert anchor_due(links, 400, WHOLE, 100)
    assert not anchor_due(links, 400, float("inf"), 100)
    # Changes that lead to the anchor itself are not what a late joiner fetches after it.
    assert not anchor_due([link(0), link(1, 0, 900), link(2), link(2, 1, 900)], 999, WHOLE, 100)
    assert anchor_due([], 0, WHOLE, 100)


def test_blob_names_are_read_back_and_others_are_left_alone():
    for name in (BlobName("policy", Version(1, 17), "00ff", None), BlobName("critic", Version(0, 3), "aa", Version(0, 2))):
        assert BlobName.parse(f"{name.prefix}/00012") == name
    for other in ("weights/policy/0-1/aa/00000", "weights/policy/0-1/aa/whole", "samples/x", "weights/policy/0-x/aa/whole/00000"):
        assert BlobName.parse(other) is None


def blobs(links: list[Link], upload: str = "aa") -> list[BlobName]:
    return [BlobName("policy", one.version, f"{upload}{one.version.number:02x}", one.parent) for one in links]


def test_nothing_that_a_kept_version_is_made_from_goes():
    stored = blobs(run(10, 4))
    assert {v.number for v in needed(stored, {Version(0, 6)})} == {4, 5, 6}
    assert {v.number for v in needed(stored, {Version(0, 8)})} == {8}
    assert {v.number for v in needed(stored, {Version(0, 9), Version(0, 2)})} == {0, 1, 2, 8, 9}


def test_an_upload_that_was_never_announced_frees_nothing():
    """Version 6 was stored whole by a publisher that died before it said so; the announced one needs its parents."""
    stored = [*blobs(run(7, 4)), BlobName("policy", Version(0, 6), "dead", None)]
    assert {v.number for v in needed(stored, {Version(0, 6)})} == {4, 5, 6}
