"""Stages of layers, each on ranks of its own, and the order in which they work: one forward, one backward (1F1B, arXiv 2104.04473).

```text
two stages, three micro-batches     stage 0   F1 F2    B1 F3    B2    B3        the last stage goes back through a micro-batch at once;
                                    stage 1      F1 B1    F2 B2    F3 B3        a stage before it runs ahead by as many as are behind it
```
All ranks of a copy have the same micro-batches, so each knows the shape of what comes before it is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.core.packing import MicroBatch
from streamrl.tensors.collectives import among_ranks
from streamrl.trainers.megatron.ranks import Line

Run = Callable[[MicroBatch, Tensor | None], Tensor]
"""The stage's layers, of a micro-batch and what the stage before it made of it."""
Shape = Callable[[MicroBatch], tuple[int, ...]]


class Pipeline:
    """One rank's place in the line of ranks that a micro-batch goes through. All of its ranks call `turns` together, with the same batches.

    Args:
        line: the ranks.
        dtype: of what is sent.
        device: where it is made.
    """

    def __init__(self, line: Line, dtype: torch.dtype, device: torch.device) -> None:
        self._ranks, self._stage, self._down, self._up = line
        self._stages = len(line.ranks)
        self._dtype, self._device = dtype, device
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self.given: Tensor | None = None
        """On the last stage: what came of the micro-batch whose turn it is."""

    def turns(self, micros: Sequence[MicroBatch], run: Run, shape: Shape, *, learns: bool) -> Iterator[MicroBatch]:
        """On the last stage each micro-batch when it is there; whoever asks for the next one has gone back through this one.

        A stage before it yields none and does all of its work.

        Args:
            micros: of one optimizer step, or of what is only looked at.
            run: this stage's layers; not called here on the last stage.
            shape: of what is sent of a micro-batch.
            learns: there is a backward pass.

        Raises:
            TrainingError: another rank has ended, or hangs.
        """
        if self._stage == self._stages - 1:
            for micro in micros:
                self.given = self._receive(shape(micro), self._stage - 1, self._down).requires_grad_(learns)
                yield micro
                if learns:
                    # A loss of the user's may have no gradient.
                    self._send(torch.zeros_like(self.given) if self.given.grad is None else self.given.grad, self._stage - 1, self._up)
            self.given = None
        else:
            with torch.set_grad_enabled(learns):
                self._run_ahead(micros, run, shape, learns=learns)
        while self._sent:
            self._settle()

    def _run_ahead(self, micros: Sequence[MicroBatch], run: Run, shape: Shape, *, learns: bool) -> None:
        made: deque[tuple[Tensor | None, Tensor]] = deque()
        for micro in micros:
            given = None
            if self._stage:
                given = self._receive(shape(micro), self._stage - 1, self._down).requires_grad_(learns)
            out = run(micro, given)
            self._send(out.detach(), self._stage + 1, self._down)
            if learns:
                made.append((given, out))
                if len(made) == self._stages - self._stage:
                    self._back(*made.popleft())
        while made:
            self._back(*made.popleft())

    def _back(self, given: Tensor | None, out: Tensor) -> None:
        out.backward(self._receive(tuple(out.shape), self._stage + 1, self._up))
        if given is not None:
            assert given.grad is not None  # every layer passes one on
            self._send(given.grad, self._stage - 1, self._up)

    def _receive(self, shape: tuple[int, ...], stage: int, group: dist.ProcessGroup) -> Tensor:
        found = torch.empty(shape, dtype=self._dtype, device=self._device)
        with among_ranks("a stage of the pipeline"):
            dist.recv(found, self._ranks[stage], group)
        return found

    def _send(self, values: Tensor, stage: int, group: dist.ProcessGroup) -> None:
        """Without waiting: the receiver may be sending too. No more are on their way than there are stages, in each direction."""
        values = values.contiguous()
        with among_ranks("a stage of the pipeline"):
            self._sent.append((dist.isend(values, self._ranks[stage], group), values))
        if len(self._sent) > 2 * self._stages:
            self._settle()

    def _settle(self) -> None:
        work, _ = self._sent.popleft()
        with among_ranks("a stage of the pipeline"):
            work.wait()
