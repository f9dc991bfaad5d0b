"""One rank of a server: its buffers from the model's load on, its channel from the scheduler's start on."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

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
from streamrl.engines.live_swap.model import aliases, left_out
from streamrl.engines.live_swap.staging import Stager
from streamrl.engines.live_swap.swap import Swap
from streamrl.errors import WeightSyncError
from streamrl.schemas.versions import Version


class Choice(msgspec.Struct, frozen=True):
    """`flip`, `copy`, `copy_pinned` or `none`, and the reason in words."""

    swap: str
    why: str


def choose(settings: Settings, model_runner: Any) -> Choice:
    """Decide once the model is loaded and before the KV cache takes the rest of the memory."""
    obstacle = _obstacle(model_runner)
    if obstacle:
        return Choice("none", obstacle)
    wanted = settings.swap
    left_behind = aliases(model_runner.model)
    if left_behind and wanted in ("auto", "flip"):
        return Choice("copy", f"parameters are also kept as {', '.join(left_behind[:3])}, which a flip would leave behind")
    if wanted != "auto":
        return Choice(wanted, "asked for")
    short = _memory_short(settings, model_runner)
    return Choice("copy_pinned", short) if short else Choice("flip", "a second buffer fits")


def _obstacle(model_runner: Any) -> str:
    """What rules out every way to change the weights."""
    args = model_runner.server_args
    if args.pp_size > 1:
        return "pipeline parallelism: ranks do not reach a commit before the same forward pass"
    if args.dp_size > 1:
        return "data parallelism within a server: start one engine for each replica"
    quantization = args.quantization or getattr(model_runner.model_config, "quantization", None)
    if quantization:
        return f"quantized weights ({quantization}): they are derived from a version's tensors"
    if getattr(args, "enable_eplb", False):
        return "expert load balancing moves experts between ranks"
    parameters = list(model_runner.model.parameters())
    if len({parameter.device for parameter in parameters}) != 1:
        return "weights on several devices (offloading)"
    packed = [name for name, module in model_runner.model.named_modules() if getattr(module, "use_intel_amx_backend", False)]
    if packed:
        return f"weights packed for the processor's matrix unit ({packed[0]} ...)"
    return _untrue(model_runner.model)


def _untrue(model: nn.Module) -> str:
    """Why what is copied to the parameters would not be all that is served, though its digest agreed; empty if it would."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "quant_method", None), "use_flashinfer_trtllm_moe", False):
            return f"{name} has its experts in the order of flashinfer_trtllm: set another moe_runner_backend"
    if found := left_out(model):
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        return f"a version does not reach {found[0]}{more}: loaded once or computed from weights when they are loaded"
    return ""


def _memory_short(settings: Settings, model_runner: Any) -> str:
    """Why a second buffer beside the first would leave too little for the KV cache; empty if it would not."""
    parameters = list(model_runner.model.parameters())
    device = parameters[0].device
    if device.type != "cuda":
        return ""
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    before = int(model_runner.pre_model_load_memory * (1 << 30))
    return memory_short(free, before, nbytes, fraction=model_runner.mem_fraction_static, reserve=settings.reserve)


def memory_short(free: int, before: int, nbytes: int, *, fraction: float, reserve: float) -> str:
    """Why a second buffer of `nbytes` would leave too little for the KV cache; empty if it would not.

    Args:
        free: bytes that are free now, the model being loaded.
        before: bytes that were free before. SGLang counts by these, for others may have a part of the GPU, such as a trainer.
        nbytes: of the buffer.
        fraction: `mem_fraction_static`: SGLang leaves the rest of `before` free.
        reserve: part of `before` that the KV cache must have.
    """
    left = free - nbytes - (1 - fraction) * before
    if left >= reserve * before:
        return ""
    return (
        f"a second buffer of {nbytes / 1e9:.1f} GB would leave {max(0.0, left) / 1e9:.1f} GB for the KV cache "
        f"(mem_fraction_static {fraction} of {before / 1e9:.1f} GB, {reserve * before / 1e9:.1f} GB wanted)"
    )


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
