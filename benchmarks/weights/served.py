"""What became of the load's requests: whether any was cut, or its keys and values computed again."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from benchmarks.weights.records import Forwards, RequestRecord, RunRecord


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of requests."""

    ended: int
    aborted: int
    retracted: int
    failed: int
    prefilled_again: int
    """Prefills from the first window to the last beyond one for each request that was under way then; at least so many were repeated."""
    mixed: int
    """Those with tokens of more than one version: they went on while the weights changed."""
    most_versions: int
    """Of one request."""

    @property
    def cut(self) -> int:
        """Requests that an update, or anything else, has disturbed."""
        return self.aborted + self.retracted + self.failed + self.prefilled_again


def count_served(run: RunRecord, requests: Sequence[RequestRecord], forwards: Forwards) -> Served:
    """Count what ended; each of the run's streams had one more request under way at the end."""
    versions = [len({version for version, _ in request.versions}) for request in requests]
    return Served(
        ended=len(requests),
        aborted=sum(request.finish == "abort" for request in requests),
        retracted=sum(request.retractions for request in requests),
        failed=sum(bool(request.error) for request in requests),
        prefilled_again=_prefilled_again(run, requests, forwards),
        mixed=sum(count > 1 for count in versions),
        most_versions=max(versions, default=0),
    )


def _prefilled_again(run: RunRecord, requests: Sequence[RequestRecord], forwards: Forwards) -> int:
    if not run.windows:
        return 0
    start_s, end_s = run.windows[0].start_s, run.windows[-1].end_s
    inside = forwards.extend & (forwards.host_s >= start_s) & (forwards.host_s < end_s)
    prefills = int(forwards.rows[inside].sum())
    known = sum(request.end_s >= start_s and request.start_s < end_s for request in requests)
    return max(0, prefills - known - run.streams)
