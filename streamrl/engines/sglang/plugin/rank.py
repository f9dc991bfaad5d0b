"""One rank of a server: its buffers from the model's load on, its channel from the scheduler's start on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from streamrl.engines.live_swap.buffers import Buffers
from streamrl.engines.live_swap.forwards import Forwards as ForwardCounter
from streamrl.engines.live_swap.graphs import GraphSets
from streamrl.engines.live_swap.messages import (
    CommitLog,
    Commits,
    Failed,
    ForwardLog,
    Forwards,
    Hello,
    Prepare,
    Rank,
    Reply,
    Request,
    ServedDigest,
    Settings,
    Stage,
)
from streamrl.engines.live_swap.staging import Stager
from streamrl.engines.live_swap.swap import Swap
from streamrl.engines.sglang.plugin.choice import Choice, choose
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)


class Placement(msgspec.Struct, frozen=True):
    """Where a rank is."""

    rank: int
    size: int
    sglang: str


class ServedRank:
    """Everything the plugin keeps in one scheduler process.

    Args:
        settings: from the environment.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._choice: Choice | None = None
        self._buffers: Buffers | None = None
        self._graphs: GraphSets | None = None
        self._stager: Stager | None = None
        self._place = Placement(0, 1, "")
        self.swap: Swap | None = None
        self.forwards = ForwardCounter(keep=settings.record, device=torch.device("cpu"))

    def model_loaded(self, model_runner: Any) -> None:
        """Reserve the second buffer. Before SGLang sizes its KV cache, which then takes what is left."""
        self._choice = choose(self.settings, model_runner)
        if self._choice.swap != "none":
            started = time.perf_counter()
            self._buffers = Buffers(model_runner.model, pinned=self._choice.swap == "copy_pinned")
            logger.info(
                "event=streamrl_buffer swap=%s why=%s bytes=%d seconds=%.2f",
                self._choice.swap,
                self._choice.why,
                self._buffers.nbytes,
                time.perf_counter() - started,
            )

    def graphs_captured(self, model_runner: Any) -> None:
        """Capture the second graph set, and take the weights over as SGLang has loaded them."""
        if self._buffers is None or self._choice is None:
            return
        self._buffers.fill()
        if self._choice.swap == "flip":
            self._graphs = GraphSets(model_runner, self._buffers)
        self.swap = Swap(self._buffers, self._graphs)

    def scheduler_started(self, place: Placement, streams: Sequence[Any]) -> None:
        """The scheduler is about to serve.

        Args:
            place: of this rank.
            streams: that it uses.
        """
        self._place = place
        if self.swap is not None:
            self.forwards = ForwardCounter(keep=self.settings.record, device=self.swap.device)
            self._stager = Stager(self.swap, self.forwards, streams)

    def commit(self, version: Version, stream: Any, *, copy: bool = False) -> bool:
        """From the scheduler's thread, between two forward passes: serve a staged version. False when it is refused."""
        if self.swap is None:
            return False
        done = self.swap.commit(version, forward=self.forwards.launched, stream=stream, copy=copy)
        logger.info(
            "event=streamrl_commit rank=%d version=%s committed=%s forward=%d host_ms=%.3f%s",
            self._place.rank,
            version,
            done.committed,
            done.forward,
            done.host_ms,
            f" reason={done.reason}" if done.reason else "",
        )
        return done.committed

    def answer(self, request: Request) -> Reply:
        """Do what a client asks; raises StreamRLError where it cannot be done."""
        match request:
            case Hello():
                return self._hello()
            case Prepare():
                return self._staging().prepare(request)
            case Stage():
                return self._staging().stage(request)
            case ServedDigest():
                return self._staging().served(request.layout)
            case Commits():
                return self.swap.log(request.after) if self.swap is not None else CommitLog(serving=None, staged=None, commits=())
            case Forwards():
                return self.forwards.take() if self.settings.record else self._not_recorded()

    def _not_recorded(self) -> ForwardLog | Failed:
        return Failed(message="forward passes are not recorded", hint="set engine.sglang.record_forwards = true")

    def _staging(self) -> Stager:
        if self._stager is None:
            raise WeightSyncError(f"this server's weights cannot be changed: {self._choice.why if self._choice else 'no model was loaded'}")
        return self._stager

    def _hello(self) -> Rank:
        choice, swap, graphs = self._choice, self.swap, self._graphs
        return Rank(
            rank=self._place.rank,
            size=self._place.size,
            pid=os.getpid(),
            device=str(swap.device) if swap is not None else "",
            sglang=self._place.sglang,
            swap=choice.swap if choice is not None else "none",
            why=choice.why if choice is not None else "the plugin was loaded after the model",
            buffer_nbytes=self._buffers.nbytes if self._buffers is not None else 0,
            graphs=graphs.captured if graphs is not None else (),
            graphs_s=graphs.seconds if graphs is not None else 0.0,
            graphs_nbytes=graphs.nbytes if graphs is not None else 0,
            serving=swap.serving if swap is not None else None,
            isolate=self.settings.isolate,
        )
