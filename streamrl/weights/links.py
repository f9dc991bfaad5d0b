"""Anchors and deltas as pure functions: which way leads to a version, which ways a manifest names, which bytes must stay.

An anchor is a version's bytes as a whole; a delta is what changed since its parent. A version may have both, so that an engine that
holds its parent takes the delta, and one that joins late the anchor.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

import msgspec

from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Link

_BLOB = re.compile(
    r"^weights/(?P<policy>[^/]+)/(?P<epoch>\d+)-(?P<number>\d+)/(?P<upload>[0-9a-f]+)/(?:whole|from-(?P<from_epoch>\d+)-(?P<from_number>\d+))"
    r"/\d+$"
)


def routes(links: Sequence[Link], version: Version, held: Version | None = None) -> tuple[tuple[Link, ...], ...]:
    """The ways to `version`, that with the fewest bytes first; each begins with an anchor, or with the delta of what is `held`.

    Raises:
        WeightSyncError: no way leads there, or a link is no step forward.
    """
    anchors = {link.version: link for link in links if link.parent is None}
    deltas = {link.version: link for link in links if link.parent is not None}
    found: list[tuple[Link, ...]] = []
    steps: list[Link] = []
    reached = version
    while True:
        if reached == held:
            found.append(tuple(reversed(steps)))
            break
        if reached in anchors:
            found.append((anchors[reached], *reversed(steps)))
        link = deltas.get(reached)
        if link is None or link.parent is None:
            break
        if link.parent >= link.version:
            raise WeightSyncError(
                f"expected the changes of {link.version} to be those since an older version, got {link.parent}",
                version=str(link.version),
                parent=str(link.parent),
            )
        steps.append(link)
        reached = link.parent
    if not found:
        raise WeightSyncError(
            f"expected an anchor and the changes since it for version {version}, got links for {', '.join(str(x.version) for x in links)}",
            hint="the publisher begins with an anchor when it restarts",
            version=str(version),
        )
    return tuple(sorted(found, key=lambda route: sum(link.nbytes for link in route)))


def window(links: Sequence[Link]) -> tuple[Link, ...]:
    """What a manifest names of all links so far, oldest first: those since the last anchor but one.

    Enough for a late joiner (the newest anchor and what follows), and for an engine that fell behind by up to two anchors.
    """
    anchors = [index for index, link in enumerate(links) if link.parent is None]
    return tuple(links[anchors[-2] :]) if len(anchors) > 1 else tuple(links)


def anchor_due(links: Sequence[Link], delta_bytes: int, whole_bytes: float, every: int) -> bool:
    """Whether the next version, `delta_bytes` as a delta, is to have an anchor.

    It is when `every` versions are out since the last one; and sooner, when the deltas since then add up to a whole version: a late
    joiner never fetches more than twice its bytes.

    Args:
        links: of the versions so far, oldest first.
        delta_bytes: of the next version as changes.
        whole_bytes: of the next version; infinite where only the number of versions counts.
        every: versions from one anchor to the next at most.
    """
    since: list[Link] = []
    for link in reversed(links):
        if link.parent is None:
            last = link
            break
        since.append(link)
    else:
        return True
    # The anchor's own delta, if it has one, is for those that held its parent.
    chain = [link for link in since if link.version != last.version]
    return len(chain) + 1 >= every or sum(link.nbytes for link in chain) + delta_bytes >= whole_bytes


class BlobName(msgspec.Struct, frozen=True):
    """What the name of a blob says: retirement needs no other record, so that another process can do it."""

    policy: str
    version: Version
    upload: str
    """Random; a version that was published twice has two."""
    parent: Version | None

    @property
    def prefix(self) -> str:
        """Of the names of all blobs of one link."""
        how = "whole" if self.parent is None else f"from-{self.parent.epoch}-{self.parent.number}"
        return f"weights/{self.policy}/{self.version.epoch}-{self.version.number}/{self.upload}/{how}"

    @classmethod
    def parse(cls, name: str) -> BlobName | None:
        """None for a blob that holds no weights."""
        match = _BLOB.match(name)
        if match is None:
            return None
        parent = Version(int(match["from_epoch"]), int(match["from_number"])) if match["from_epoch"] else None
        return cls(match["policy"], Version(int(match["epoch"]), int(match["number"])), match["upload"], parent)


def needed(stored: Iterable[BlobName], keep: Collection[Version]) -> frozenset[Version]:
    """The versions whose bytes must stay so that those in `keep` can be fetched: theirs, and what they are made from."""
    parents: dict[Version, set[Version]] = {}
    uploads: dict[tuple[Version, str], set[Version | None]] = {}
    for blob in stored:
        uploads.setdefault((blob.version, blob.upload), set()).add(blob.parent)
    for (version, _), ways in uploads.items():
        # An upload with an anchor needs no other version; another upload of the same version may.
        if None not in ways:
            parents.setdefault(version, set()).update(parent for parent in ways if parent is not None)
    found: set[Version] = set()
    waiting = list(keep)
    while waiting:
        version = waiting.pop()
        if version not in found:
            found.add(version)
            waiting.extend(parents.get(version, ()))
    return frozenset(found)
