"""Keeps a `Look` at a run up to date from outside, over restarts of its supervisor and of its bus."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque

import msgspec

from streamrl.bus.protocol import Bus
from streamrl.config.tree import Config
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.errors import BusError, ConfigError, SchemaError, StreamRLError
from streamrl.monitor.accounting import devices_of
from streamrl.monitor.follow import Follower, read_totals
from streamrl.monitor.glance import judged
from streamrl.monitor.look import Look, SampleLine, look_of
from streamrl.monitor.recent import Recent
from streamrl.monitor.runs import describe
from streamrl.monitor.screen import clock, one_line
from streamrl.monitor.series import Series
from streamrl.monitor.view import RunView
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.worker import connected
from streamrl.schemas.decoding import decode_samples
from streamrl.schemas.sample_batch import SampleBatch
from streamrl.schemas.subjects import SAMPLES, kind_of

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_RATE_LOOK_S = 1.2
"""Long enough for two samples of the totals, which a rate needs."""
_CONNECT_S = 5.0
_READ_S = 2.0
_READ_EVERY_S = 0.9
_QUIET_S = 4.0
"""The bus is called away when it has not answered for so long; its keys are asked every second."""
_ANEW_S = 15.0
"""After so long the connection is made anew: the run may have been resumed at another address."""
_NUM_SAMPLES = 6
_NUM_NOTES = 3
_CHEAP_BYTES = 1 << 18
"""So much may be read a second: a message twice this size has two seconds without one after it."""
_MOST_CHARS = 400


class Looker:
    """One run, looked at.

    Args:
        run: its directory; it need not be up.
    """

    def __init__(self, run: RunDir) -> None:
        self.ready = asyncio.Event()
        """Set once there is something to be seen."""
        self._run = run
        self._last = Look(run=run.name, state=describe(run).state)
        self._notes: deque[str] = deque(maxlen=_NUM_NOTES)
        self._samples: Samples | None = None
        self._recent = Recent(run.metrics)

    @property
    def last(self) -> Look:
        """The newest look."""
        return self._last

    async def follow(self) -> None:
        """Look for ever."""
        while True:
            try:
                config = self._run.load_config()
                line = describe(self._run)
                if not line.parent and (line.supervisor is not None or config.bus.url):  # a branch has no bus
                    await self._session(config)
                self._say("")
            except (BusError, ConfigError) as error:
                logger.info("event=look_failed error=%s", error.message)
                self._say("its bus does not answer" if isinstance(error, BusError) else one_line(error.message))
            self.ready.set()
            await asyncio.sleep(_LOOK_S)

    async def _session(self, config: Config) -> None:
        """Follow one server until it has gone; raises BusError if it is not there."""
        async with connected(self._run, role="reader", patience_s=_CONNECT_S, gather=True) as bus:
            view = RunView(
                self._run.name,
                steps=config.run.steps,
                warmup_steps=config.warmup.max_steps,
                before=await read_totals(bus),
                joined=True,
                series=Series(window_s=config.metrics.window_s),
                devices=devices_of(config),
            )
            self._samples = self._samples or Samples(_tokenizer(self._run, config))
            async with Follower(bus, view, trainer=config.trainer.name) as follower:
                await follower.catch_up()
                await asyncio.sleep(_RATE_LOOK_S)
                while await self._look(config, bus, view, follower):
                    self.ready.set()
                    await asyncio.sleep(_LOOK_S)

    async def _look(self, config: Config, bus: Bus, view: RunView, follower: Follower) -> bool:
        """One look; False if there is no more to be seen over this connection."""
        quiet_s = time.monotonic() - follower.answered_s
        if quiet_s < _QUIET_S and self._samples is not None:
            await self._samples.look(bus, view.stream_last, time.monotonic())
        view.take_rows(time.time())
        self._notes += view.take_notices()
        line = describe(self._run)
        self._last = look_of(
            view,
            judged(view, config, elapsed_s=follower.elapsed_s),
            self._recent,
            state=line.state,
            away=f"its bus does not answer, for {clock(quiet_s)}" if quiet_s >= _QUIET_S else "",
            samples_bytes=config.bus.samples_bytes,
            notes=self._notes,
            samples=self._samples.lines if self._samples else (),
            summary=line.summary,
        )
        return quiet_s < _ANEW_S and (line.supervisor is not None or bool(config.bus.url))

    def _say(self, away: str) -> None:
        """Nothing is heard of the run; what was known stays."""
        line = describe(self._run)
        self._last = msgspec.structs.replace(self._last, state=line.state, away=away, now_s=time.time(), summary=line.summary)


class Samples:
    """The newest samples, read one message a second at most; after a large one later.

    Args:
        tokenizer: of the run; None: ids are shown.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._lines: deque[SampleLine] = deque(maxlen=_NUM_SAMPLES)
        self._seen = 0
        self._next_s = 0.0

    @property
    def lines(self) -> tuple[SampleLine, ...]:
        """The newest first."""
        return tuple(reversed(self._lines))

    async def look(self, bus: Bus, last: int, now_s: float) -> None:
        """Read the message `last`, the newest, if it is a new one and time for it. What cannot be read is passed over."""
        if now_s < self._next_s or last in (0, self._seen):
            return
        self._seen = last
        # A bus that is away would have a request tried again for a minute, and whoever looks would wait for it.
        with contextlib.suppress(BusError, TimeoutError):
            async with asyncio.timeout(_READ_S):
                message = await bus.fetch(SAMPLES, last)
                self._next_s = now_s + max(_READ_EVERY_S, len(message.body) / _CHEAP_BYTES)
                if kind_of(message.subject) == "samples":
                    with contextlib.suppress(SchemaError):
                        self._lines.append(self._line(decode_samples(message.body, where=f"{message.subject} {message.sequence}")))

    def _line(self, batch: SampleBatch) -> SampleLine:
        """The first sample of a message."""
        first, end = batch.offsets[:2].tolist()
        tokens, mask = batch.tokens[first:end].tolist(), batch.loss_mask[first:end].tolist()
        start = mask.index(1) if 1 in mask else len(tokens)
        reward = float(batch.rewards[0])
        return SampleLine(
            task=batch.task,
            rollout=int(batch.rollouts[0]),
            reward=None if reward != reward else reward,
            prompt=self._text(tokens[:start][-_MOST_CHARS:]),
            answer=self._text(tokens[start:][:_MOST_CHARS]),
        )

    def _text(self, tokens: list[int]) -> str:
        text = " ".join(map(str, tokens)) if self._tokenizer is None else self._tokenizer.decode(tokens)
        return one_line(text, most=_MOST_CHARS)


def _tokenizer(run: RunDir, config: Config) -> Tokenizer | None:
    """The run's; None where its files cannot be read, as on another host."""
    try:
        return load_tokenizer(run.policy_dir(config))
    except (StreamRLError, OSError) as error:
        logger.info("event=no_tokenizer error=%s", error)
        return None
