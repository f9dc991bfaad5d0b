"""How the layers and the output head of one model are run: plain or compiled, and which layers keep their activations."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from streamrl.algorithms.chunked_head import ChunkKernels, chunk_kernels
from streamrl.trainers.torch.kernels import never_eager_again

not_compiled: Any = torch.compiler.disable
"""Of a part of a layer, which is left out where the layer is compiled."""

CHECKPOINT: Any = {"use_reentrant": False, "preserve_rng_state": False}
"""How torch's `checkpoint` runs a layer again: nothing in it is random."""


class Layers:
    """Puts what is to be run in the place of each layer's `forward`: beneath the module's hooks, which gather one that is cut into parts.

    Args:
        modules: the layers, from the input on; none where they are not known.
        vocab_size: of the head.
        run_again: runs a layer's function, keeping nothing, and runs it once more in the backward pass; None: torch's `checkpoint`.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], vocab_size: int, run_again: Callable[..., Any] | None = None) -> None:
        self.modules = modules
        self._run_again = run_again or partial(checkpoint, **CHECKPOINT)
        self.chunks: ChunkKernels | None = None
        """Of the head; None: it is not compiled, nor are the layers."""
        self._vocab_size = vocab_size
        self._plain: list[Callable[..., Any]] = [module.forward for module in modules]
        self._fast: list[Callable[..., Any]] = []
        """The layers as torch.compile makes them, once that has been asked for."""
        self._fast_chunks: ChunkKernels | None = None
        self._again = 0
        """Layers, the first ones, that are run again in the backward pass."""

    def __len__(self) -> int:
        return len(self.modules)

    def arrange(self, *, compiled: bool, kept: int | None) -> None:
        """See `CausalLM.arrange`; `kept` is in range."""
        if compiled and self._fast_chunks is None:
            never_eager_again()
            self._fast = [torch.compile(plain, dynamic=False) for plain in self._plain]
            self._fast_chunks = chunk_kernels(self._vocab_size, compiled=True)
        self.chunks = self._fast_chunks if compiled else None
        self._again = 0 if kept is None else len(self) - kept
        self._put(self._fast if compiled else self._plain)

    @contextmanager
    def trying(self) -> Generator[list[str]]:
        """While entered, a compiled layer that fails, and those behind it, are run as they are, and the list that is given says why.

        So the pass goes on to its end, as it must where other ranks wait for this one to gather each layer.
        """
        reasons: list[str] = []
        self._put([_falling_back(fast, plain, reasons) for fast, plain in zip(self._fast, self._plain, strict=True)])
        try:
            yield reasons
        finally:
            self._put(self._fast)

    def _put(self, runs: Sequence[Callable[..., Any]]) -> None:
        for number, (module, run) in enumerate(zip(self.modules, runs, strict=True)):
            again = number < self._again
            module.forward = partial(self._run_again, run) if again else run


def first_line(error: BaseException) -> str:
    """Of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _falling_back(fast: Callable[..., Any], plain: Callable[..., Any], reasons: list[str]) -> Callable[..., Any]:
    broken: bool | None = None

    def run(*given: Any, **named: Any) -> Any:
        nonlocal broken
        if broken is None:  # and for good: a layer that is run again must do what it did
            broken = bool(reasons)
        if not broken:
            try:
                return fast(*given, **named)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # of every part of torch.compile, down to a compiler that is not installed
                broken = True
                reasons.append(first_line(error))
        return plain(*given, **named)

    return run
