"""Which of the announced versions an engine serves: pure functions of what was announced, what is pinned and what it serves now."""

from __future__ import annotations

from collections.abc import Collection

from streamrl.schemas.versions import Version


def choose_latest(announced: Collection[Version], delay_versions: int = 0) -> Version | None:
    """The newest version, or the one `delay_versions` before it in its epoch (the first, while there are not that many).

    None: none is announced. What an epoch's first version follows may be lost, so no version of a former epoch is gone back to.
    """
    if not announced:
        return None
    newest = max(announced)
    return min(one for one in announced if one.epoch == newest.epoch and one.number >= newest.number - delay_versions)


def choose_pinned(announced: Collection[Version], pinned: Collection[Version], serving: Version | None) -> Version | None:
    """The version to take next for those who pinned one; None: stay with what is served.

    Pins are served in order: the lowest until it is let go, so that two evaluations do not take the engine from each other. A pinned
    version that was never published (a newer one replaced it) stands for the first one after it. There is no way back: a pin on
    what the engine has passed is not served any more, and its holder gets what the engine serves.
    """
    for pin in sorted(pinned):
        target = min((version for version in announced if version >= pin and version.number >= pin.number), default=None)
        if target is None or target == serving:
            # Either it is still to come, or it is being served.
            return None
        if serving is None or target > serving:
            return target
    return None
