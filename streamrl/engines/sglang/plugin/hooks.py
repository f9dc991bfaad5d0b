"""The hooks into SGLang, all of them: the only place that imports it. Written against SGLang 0.5.17 and 0.5.23."""

# SGLang is not installed where types are checked.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from streamrl.engines.live_swap.channel import Channel
from streamrl.engines.live_swap.messages import COPY_KEY, EPOCH_KEY, NUMBER_KEY, Settings
from streamrl.engines.sglang.plugin.rank import Placement, ServedRank
from streamrl.engines.sglang.plugin.stamps import one_for_each_token, stamp
from streamrl.engines.sglang.prefixes import renewed_key
from streamrl.schemas.versions import Version

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_SWITCH_S = 1e-4
"""How long one thread may keep the interpreter from another. A scheduler that polls gives it up only by force: at Python's 5 ms each
of a staging's thousands of calls waits so long (0.6B on an H200: 48 s a version)."""
_MODEL_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"


def register_hooks(text: str) -> None:
    """Register with SGLang's hook registry, which applies the hooks when this plugin has returned.

    Args:
        text: `Settings` as JSON.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks = Hooks(ServedRank(msgspec.json.decode(text, type=Settings)))
    HookRegistry.register(f"{_MODEL_RUNNER}.load_model", hooks.load_model, HookType.AROUND)
    HookRegistry.register(f"{_MODEL_RUNNER}.init_cuda_graphs", hooks.init_cuda_graphs, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.__init__", hooks.scheduler_init, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}._add_request_to_queue", hooks.add_request, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.run_batch", hooks.run_batch, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.set_internal_state", hooks.set_internal_state, HookType.AROUND)


class Hooks:
    """What SGLang calls, for the one rank of this process."""

    def __init__(self, rank: ServedRank) -> None:
        self._rank = rank

    def load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        if not runner.is_draft_worker:
            self._rank.model_loaded(runner)
        return result

    def init_cuda_graphs(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        if not runner.is_draft_worker:
            self._rank.graphs_captured(runner)
        return result

    def scheduler_init(self, original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
        original(scheduler, *args, **kwargs)
        place = _placement()
        self._rank.scheduler_started(place, [scheduler.forward_stream, scheduler.copy_stream])
        if not scheduler.spec_algorithm.is_none():
            one_for_each_token(scheduler.batch_result_processor)
        sys.setswitchinterval(_SWITCH_S)
        Channel(self._rank.settings.dir, place.rank, self._rank.answer)
        logger.info("event=streamrl_plugin rank=%d dir=%s", place.rank, self._rank.settings.dir)

    def add_request(self, original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        """New requests, and retracted ones. A request may have been sent before a commit that it arrives after."""
        self._renew_keys([request])
        return original(scheduler, request, *args, **kwargs)

    def run_batch(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        swap, forwards = self._rank.swap, self._rank.forwards
        if swap is None:
            return original(scheduler, batch, *args, **kwargs)
        version, rows = swap.stamp, len(batch.reqs)
        launched_s = forwards.launching()
        extend = batch.forward_mode.is_extend()
        result = original(scheduler, batch, *args, **kwargs)
        stamp(result, rows, version)
        forwards.launch_done(launched_s, _stream(scheduler), rows, extend, version)
        return result

    def set_internal_state(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        values = request.server_args
        if NUMBER_KEY not in values:
            return original(scheduler, request)
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput

        version = Version(int(values.get(EPOCH_KEY, 0)), int(values[NUMBER_KEY]))
        done = self._rank.commit(version, _stream(scheduler), copy=bool(values.get(COPY_KEY, 0)))
        if done:
            self._renew_keys(scheduler.waiting_queue)
            if scheduler.chunked_req is not None:
                logger.info("event=streamrl_commit_within_prefill version=%s request=%s", version, scheduler.chunked_req.rid)
        return SetInternalStateReqOutput(updated=done)

    def _renew_keys(self, waiting: Sequence[Any]) -> None:
        """Prompts not yet prefilled will be by the version served now, so they share no keys and values of older ones.

        What already runs keeps its key: what it leaves in the cache was computed in part by the version that it began with.
        """
        swap = self._rank.swap
        if swap is None or swap.serving is None:
            return
        for request in waiting:
            request.extra_key = renewed_key(request.extra_key, swap.serving)


def _stream(scheduler: Any) -> Any:
    """The stream that forward passes run on: without overlap scheduling it is the one that the scheduler's thread is in."""
    if scheduler.enable_overlap or scheduler.device != "cuda":
        return scheduler.forward_stream
    return torch.cuda.current_stream()


def _placement() -> Placement:
    import sglang
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return Placement(parallel.tp_rank, parallel.tp_size, sglang.__version__)
