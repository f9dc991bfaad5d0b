"""A session of a run held against its objectives, and who is told when that changes."""

from __future__ import annotations

import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from streamrl.config.tree import Config
from streamrl.monitor.glance import signs_of
from streamrl.monitor.numbers import Finding, RunNumbers
from streamrl.monitor.slo import Judge, detail_of, line_of
from streamrl.monitor.view import RunView

logger = logging.getLogger(__name__)

_MOST_WAITING = 16
"""Changes that wait for a webhook; beyond, the newest are lost, and logged."""


class Objectives:
    """Looks at a run, as often as it is asked to.

    Args:
        config: of the run.
        note: gets a line for people.
        report: gets the detail of an event.
    """

    def __init__(self, config: Config, note: Callable[[str], None], report: Callable[[dict[str, Any]], None]) -> None:
        self._config = config
        self._note, self._report = note, report
        self._judge = Judge(config.slo)
        self._webhook = Webhook(config.slo.webhook, timeout_s=config.slo.webhook_timeout_s) if config.slo.webhook else None
        self._levels: tuple[object, ...] = ()
        self._causes: tuple[object, ...] = ()
        self._told_s = 0.0
        self._newest: object = None
        self._moved_s = time.monotonic()

    def look(self, view: RunView, numbers: RunNumbers, *, now_s: float, over: bool) -> None:
        """Judge, and tell of changes. A run that is `over`, or ends, is held to nothing any more."""
        newest = view.trained.newest
        if newest is not self._newest:
            self._newest, self._moved_s = newest, now_s
        found: tuple[Finding, ...] = ()
        if not over:
            signs = signs_of(view, numbers, self._config, still_s=now_s - self._moved_s)
            found = self._judge.look(signs, now_s=now_s, time_s=time.time())
        view.judged(found)
        levels = tuple((one.objective, one.level) for one in found)
        causes = tuple(tuple(cause.name for cause in one.causes) for one in found if one.reached is None)
        # Levels hold before they count; what else is seen of the same trouble may change with every window.
        if levels != self._levels or (causes != self._causes and now_s - self._told_s >= self._config.slo.hold_s):
            self._levels, self._causes, self._told_s = levels, causes, now_s
            self._tell(found, over=over)

    def close(self) -> None:
        """Let go of the webhook, which may take its time limit."""
        if self._webhook is not None:
            self._webhook.close()

    def _tell(self, found: Sequence[Finding], *, over: bool) -> None:
        for one in found:
            self._note(line_of(one))
        if not found and not over:  # a run that ends under a breach has not met its objectives
            self._note("ok: all objectives are met")
        detail = detail_of(found)
        self._report(detail)
        if self._webhook is not None:
            self._webhook.send({"run": self._config.run.name, "time_s": time.time(), **detail})


class Webhook:
    """Posts JSON to a URL from a thread; one that does not answer costs log lines, and nobody waits for it.

    Args:
        url: http or https.
        timeout_s: longest wait for it.
    """

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self._url, self._timeout_s = url, timeout_s
        self._host = urlsplit(url).netloc
        self._waiting: queue.Queue[bytes | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, value: object) -> None:
        """Post `value`, some time."""
        try:
            self._waiting.put_nowait(msgspec.json.encode(value))
        except queue.Full:
            logger.warning("event=webhook_lost host=%s waiting=%d", self._host, _MOST_WAITING)

    def close(self) -> None:
        """Wait for what is under way, no longer than a post may take."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(self._timeout_s)

    def _work(self) -> None:
        while (body := self._waiting.get()) is not None:
            request = urllib.request.Request(self._url, data=body, headers={"Content-Type": "application/json"}, method="POST")
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    answer.read(1)
            except Exception as error:  # whatever stands at the other end: the run is not its affair
                # The URL may be a secret as a whole; the host is not.
                logger.warning("event=webhook_failed host=%s error=%s", self._host, type(error).__name__)
