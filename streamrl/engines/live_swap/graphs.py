"""Graph sets: a CUDA graph holds the addresses of the weights it was captured with, so each buffer needs graphs of its own."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from streamrl.engines.live_swap.buffers import Buffers

logger = logging.getLogger(__name__)

_RUNNERS = {"decode": "decode_cuda_graph_runner", "prefill": "prefill_cuda_graph_runner"}
_CAPTURE = {"decode": "init_decode_cuda_graph", "prefill": "init_prefill_cuda_graph"}
_METERS = ("graph_memory_usage", "graph_time_usage")


class GraphSets:
    """The graph runners of both buffers. Built after SGLang has captured its own graphs, with set 0 active.

    The attention backend's static tensors are shared by both sets: its `init_cuda_graph_state` must not run twice. What it keeps for
    each captured shape (FlashInfer's wrappers, say) belongs to one set and is switched with the runners.
    """

    def __init__(self, model_runner: Any, buffers: Buffers) -> None:
        self._runner = model_runner
        self._backends = list(_backends(model_runner.attn_backend))
        self.captured = tuple(
            kind for kind, name in _RUNNERS.items() if getattr(model_runner, name) not in (None, model_runner.eager_runner)
        )
        """Which of `decode` and `prefill` run from graphs."""
        self.nbytes = 0
        self.seconds = 0.0
        first = self._state()
        self._states = [first, first]
        if self.captured:
            self._states[1] = self._capture(buffers, first)

    def switch(self, index: int) -> None:
        """Replay the graphs of buffer `index` from the next forward pass on: assignments only."""
        state = self._states[index]
        for name, runner in state[0].items():
            setattr(self._runner, name, runner)
        for backend, kept in zip(self._backends, state[1], strict=True):
            backend.__dict__.update(kept)

    def _state(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        runners = {_RUNNERS[kind]: getattr(self._runner, _RUNNERS[kind]) for kind in self.captured}
        return runners, [_per_shape(backend) for backend in self._backends]

    def _capture(self, buffers: Buffers, first: tuple[dict[str, Any], list[dict[str, Any]]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        started, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
        meters = {name: getattr(self._runner, name) for name in _METERS if hasattr(self._runner, name)}
        for backend, kept in zip(self._backends, first[1], strict=True):
            backend.__dict__.update({key: dict(value) for key, value in kept.items()})
        buffers.point(1)
        try:
            with _keep_static_tensors(self._backends):
                # Prefill first, as SGLang does.
                for kind in reversed(self.captured):
                    getattr(self._runner, _CAPTURE[kind])()
            second = self._state()
        finally:
            buffers.point(0)
            for name, value in meters.items():
                setattr(self._runner, name, value)
        torch.cuda.synchronize()
        for name, runner in first[0].items():
            setattr(self._runner, name, runner)
        for backend, kept in zip(self._backends, first[1], strict=True):
            backend.__dict__.update(kept)
        self.seconds = time.perf_counter() - started
        self.nbytes = max(0, free - torch.cuda.mem_get_info()[0])
        logger.info("event=streamrl_graphs kinds=%s seconds=%.2f bytes=%d", ",".join(self.captured), self.seconds, self.nbytes)
        return second


def _backends(backend: Any) -> Iterator[Any]:
    """An attention backend and those it delegates to."""
    seen: set[int] = set()
    todo = [backend]
    while todo:
        one = todo.pop()
        if id(one) in seen or not hasattr(one, "init_cuda_graph_state"):
            continue
        seen.add(id(one))
        yield one
        for value in vars(one).values():
            todo.extend(value if isinstance(value, list | tuple) else [value])


def _per_shape(backend: Any) -> dict[str, Any]:
    return {key: value for key, value in vars(backend).items() if "cuda_graph" in key and type(value) is dict}


@contextmanager
def _keep_static_tensors(backends: list[Any]) -> Generator[None]:
    def keep(*_: Any, **__: Any) -> None:
        return None

    for backend in backends:
        backend.init_cuda_graph_state = keep
    try:
        yield
    finally:
        for backend in backends:
            del backend.init_cuda_graph_state
