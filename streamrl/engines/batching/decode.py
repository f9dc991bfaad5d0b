"""The decode loop: one thread that takes requests in, runs forward passes over the rows, and hands tokens back.

Everything that touches the rows or the model runs here, between two passes: joins, aborts, and the commit of a new
version. Other threads only put callables into the inbox. What a pass produces is handed to the event loop in one call.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from streamrl.engines.batching.delays import TokenDelay
from streamrl.engines.batching.model import DecodeModel
from streamrl.engines.batching.rows import Rows
from streamrl.engines.extras import BEGAN, CANDIDATES, EXPERTS, MATCHED
from streamrl.engines.protocol import Chunk
from streamrl.engines.requests import Completion, Job, Stage
from streamrl.errors import EngineError, EngineUnavailable
from streamrl.schemas.versions import Version
from streamrl.telemetry.clock import StateClock
from streamrl.weights.protocol import Commit

logger = logging.getLogger(__name__)

Delivery = tuple[Callable[[Any], None], Any]
"""(function, argument), to be called on the event loop."""


class DecodeLoop:
    """Continuous batching over the rows of one model.

    Args:
        model: the policy; used by this thread only (but for `prepare`).
        slots: rows decoded at once.
        engine: engine id, for chunks and messages.
        deliver: hands a pass's results to the event loop; called once a pass.
        ended: called on the event loop when the thread has ended, with the reason; nothing is handed back after it.
        delay: artificial time per token; rows are then advanced on their own (models without per-row state only).
    """

    def __init__(
        self,
        model: DecodeModel,
        *,
        slots: int,
        engine: str,
        deliver: Callable[[list[Delivery]], None],
        ended: Callable[[EngineError], None],
        delay: TokenDelay | None = None,
    ) -> None:
        self._model = model
        self._engine = engine
        self._deliver = deliver
        self._ended = ended
        self._delay = delay
        self._rows = Rows(slots, model.max_len)
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._ready: deque[Completion] = deque()
        self._held: list[tuple[Version, int, Completion]] = []
        """Heap of (least version, arrival, completion): waits for a version."""
        self._arrivals = itertools.count()
        self._out: list[Delivery] = []
        self._closing = False
        self.clock = StateClock("setup")
        """Of this thread; whoever reports it may put another one here before the thread starts."""
        self._full_s = 0.0
        self._full_since_s: float | None = None
        """Since when all rows are taken and completions wait for one."""
        self.serving: Version | None = None
        self.waiting = 0
        self.tokens_total = 0
        self.swaps_total = 0
        self.last_swap_ms = 0.0

    @property
    def running(self) -> int:
        """Completions in the batch now."""
        return self._rows.running

    def saturated_s(self) -> float:
        """Seconds so far in which all rows were taken and completions waited for one; from any thread."""
        since_s = self._full_since_s
        return self._full_s + (0.0 if since_s is None else time.monotonic() - since_s)

    # Called from any thread.

    def submit(self, job: Job) -> None:
        """Queue a request; its completions join once a row is free and the serving version is high enough."""
        self._inbox.put(lambda: self._enqueue(job))

    def abort(self, job: Job, index: int | None = None) -> None:
        """End a request, or one of its completions, before the next pass."""
        self._inbox.put(lambda: self._abort(job, index))

    def commit(self, version: Version, index: int, done: Callable[[Commit], None]) -> None:
        """Serve buffer `index` as `version` from the next pass on, unless a version as new is served; `done` runs on the event loop."""
        self._inbox.put(lambda: self._commit(version, index, done))

    def close(self) -> None:
        """End the thread after the current pass; open requests fail."""
        self._inbox.put(self._close)

    def run(self) -> None:
        """The thread's body."""
        reason = EngineUnavailable(f"engine {self._engine} was stopped with requests open", hint="ask another engine")
        try:
            with self._model.thread():
                while not self._closing:
                    self._receive()
                    self._admit()
                    if self._rows.count:
                        self._step()
                    self._flush()
        except Exception as error:
            logger.exception("event=decode_failed engine=%s version=%s", self._engine, self.serving)
            reason = EngineUnavailable(f"decoding failed at engine {self._engine}: {error!r}", hint="see its log; restart it")
        self._out.append((self._ended, reason))
        self._flush()

    # Called by the thread, between two passes.

    def _receive(self) -> None:
        timeout = self._idle_s()
        if timeout != 0.0:
            if not self.running:
                self.clock.enter("setup" if self.serving is None else "held" if self.waiting else "idle")
            try:
                self._inbox.get(timeout=timeout)()
            except Empty:
                return
        while not self._inbox.empty():
            self._inbox.get()()

    def _idle_s(self) -> float | None:
        """Seconds that may be slept before the next pass: 0 when there is work, None until a message comes."""
        if self._ready and self.running < self._rows.slots:
            return 0.0
        if not self.running:
            return None
        if self._delay is None:
            return 0.0
        return max(0.0, float(self._rows.wake_s[: self._rows.count].min()) - time.monotonic())

    def _enqueue(self, job: Job) -> None:
        self.waiting += len(job.completions)
        needed = job.request.least
        if self.serving is not None and self.serving >= needed:
            self._ready.extend(job.completions)
        else:
            for completion in job.completions:
                heapq.heappush(self._held, (needed, next(self._arrivals), completion))

    def _abort(self, job: Job, index: int | None) -> None:
        for completion in job.completions if index is None else job.completions[index : index + 1]:
            if completion.stage is Stage.RUNNING:
                self._finish(completion.row, "abort")
            elif completion.stage is Stage.WAITING:
                completion.stage = Stage.ENDED
                self.waiting -= 1
                self._hand_back(completion, Chunk(
                    completion=completion.index, token_ids=(), logprobs=(), spans=(), finish_reason="abort", engine=self._engine
                ))  # fmt: skip

    def _commit(self, version: Version, index: int, done: Callable[[Commit], None]) -> None:
        began = time.perf_counter()
        committed = self.serving is None or version > self.serving
        if committed:
            self._model.activate(index)
            self.serving = version
            self._rows.mark(version)
            while self._held and self._held[0][0] <= version:
                self._ready.append(heapq.heappop(self._held)[2])
        took_ms = (time.perf_counter() - began) * 1e3
        if committed:
            self.swaps_total += 1
            self.last_swap_ms = took_ms
            logger.info("event=commit engine=%s version=%s running=%d took_ms=%.3f", self._engine, version, self.running, took_ms)
        self._out.append((done, Commit(version, committed, took_ms)))

    def _close(self) -> None:
        self._closing = True

    def _admit(self) -> None:
        """Joiners take the rows that have become free, what is left of them is closed: one prefill, one move."""
        free = self._rows.slots - self.running
        joiners: list[Completion] = []
        while self._ready and len(joiners) < free:
            completion = self._ready.popleft()
            if completion.stage is Stage.WAITING:
                joiners.append(completion)
        if joiners:
            assert self.serving is not None
            self.waiting -= len(joiners)
            rows = self._rows.take(joiners, self.serving)
            self.clock.enter("prefill")
            self._model.join(rows, [joiner.job.prompt for joiner in joiners])
            self.clock.enter("decode")
            if self._delay is not None:
                self._rows.wake_s[rows] = time.monotonic() + self._delay.seconds(self._rows.seeds[rows])
        if (len(self._ready) > 0 and self.running == self._rows.slots) != (self._full_since_s is not None):
            self._turn_full()
        if self._rows.holes:
            targets, sources = self._rows.compact()
            if targets:
                self._model.move(targets, sources)

    def _turn_full(self) -> None:
        now_s = time.monotonic()
        since_s, self._full_since_s = self._full_since_s, None if self._full_since_s is not None else now_s
        self._full_s += 0.0 if since_s is None else now_s - since_s

    def _step(self) -> None:
        rows = self._rows
        chosen = rows.index(rows.count)
        if self._delay is not None:
            chosen = np.flatnonzero(rows.wake_s[: rows.count] <= time.monotonic())
            if not len(chosen):
                return
        # Basic slices are views; only the delayed case pays for gathers.
        part: npt.NDArray[np.int64] | slice = slice(0, rows.count) if self._delay is None else chosen
        ids, logprobs, candidates = self._model.step(rows.tokens[part], rows.positions[part], rows.drawn[part], rows.draws(part))
        if candidates is not None:
            rows.record(chosen, candidates)
        stopped, ended = rows.append(chosen, ids, logprobs)
        self.tokens_total += len(ids)
        if rows.edited:
            self._take_edited(chosen, ids, stopped, ended)
        if not np.isfinite(logprobs).all():
            self._fail_rows(chosen[~np.isfinite(logprobs)])
        for at in np.flatnonzero(ended).tolist():
            row = int(chosen[at])
            if rows.owners[row] is not None:
                self._finish(row, "stop" if stopped[at] else "length")
        if rows.streams[: rows.count].any():
            self._stream(chosen)
        if self._delay is not None:
            rows.wake_s[chosen] = time.monotonic() + self._delay.seconds(rows.seeds[chosen])

    def _take_edited(
        self, chosen: npt.NDArray[np.int64], ids: npt.NDArray[np.int64], stopped: npt.NDArray[np.bool_], ended: npt.NDArray[np.bool_]
    ) -> None:
        """Tell editors what has been drawn: a stop string ends a completion, a grammar that cannot go on fails its request."""
        for at, editor in self._rows.editors(chosen):
            if editor.take(int(ids[at])):
                stopped[at] = ended[at] = True
            owner = self._rows.owners[int(chosen[at])]
            if editor.problem and owner is not None:
                said = f"the grammar of request {owner.job.request.request_id!r} cannot go on: {editor.problem}"
                self._fail(owner.job, EngineError(said, hint="ask for a simpler json_schema or regex"))

    def _stream(self, chosen: npt.NDArray[np.int64]) -> None:
        for row in chosen[self._rows.streams[chosen]].tolist():
            owner = self._rows.owners[row]
            if owner is not None:
                self._hand_back(owner, self._chunk(row, None))

    def _finish(self, row: int, reason: str) -> None:
        owner = self._rows.owners[row]
        assert owner is not None
        chunk = self._chunk(row, reason)
        self._rows.leave(row)
        self._hand_back(owner, chunk)

    def _fail_rows(self, failed: npt.NDArray[np.int64]) -> None:
        """A model that gives NaN fails the requests it gave it for, not the engine."""
        for row in failed.tolist():
            owner = self._rows.owners[row]
            if owner is None:
                continue
            job = owner.job
            error = EngineError(
                f"expected finite logits, got NaN or infinity for request {job.request.request_id!r} under version {self.serving}",
                hint="the weights have diverged: lower trainer.optimizer.learning_rate",
                request=job.request.request_id,
                version=str(self.serving),
            )
            logger.error("event=non_finite_logits engine=%s version=%s request=%s", self._engine, self.serving, job.request.request_id)
            self._fail(job, error)

    def _fail(self, job: Job, error: EngineError) -> None:
        self._out.append((job.queue.put_nowait, error))
        for completion in job.completions:
            if completion.stage is Stage.RUNNING:
                self._finish(completion.row, "abort")
            elif completion.stage is Stage.WAITING:
                completion.stage = Stage.ENDED
                self.waiting -= 1

    def _chunk(self, row: int, reason: str | None) -> Chunk:
        rows = self._rows
        owner = rows.owners[row]
        assert owner is not None
        start, end = owner.sent, int(rows.drawn[row])
        owner.sent = end
        extras: dict[str, Any] = {}
        if reason is not None:
            extras[BEGAN] = owner.began_s
            if owner.editor is not None and owner.editor.matched:
                extras[MATCHED] = owner.editor.matched
            if (experts := self._model.experts(row)) is not None:
                extras[EXPERTS] = experts
            if (candidates := rows.recorded(row)) is not None:
                extras[CANDIDATES] = candidates
        return Chunk(
            completion=owner.index,
            token_ids=tuple(rows.out_ids[row, start:end].tolist()),
            logprobs=tuple(rows.out_logprobs[row, start:end].tolist()),
            spans=rows.spans(row, start, end),
            finish_reason=reason,
            engine=self._engine,
            extras=extras,
        )

    def _hand_back(self, completion: Completion, chunk: Chunk) -> None:
        self._out.append((completion.job.queue.put_nowait, chunk))

    def _flush(self) -> None:
        if self._out:
            self._deliver(self._out)
            self._out = []
