"""The routers of a policy over an optimizer step: load of the experts as metrics, and what balances it.

The load f that the balancing loss goes by is that of the whole step, of all its micro-batches and ranks: so neither the memory's budget
nor the number of ranks changes what is trained. It must be known before the first backward pass, which takes a forward pass more; without
`loss.experts.balance_coef` there is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from streamrl.config.loss import ExpertsConfig
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import MicroBatch
from streamrl.errors import ConfigError
from streamrl.tensors.transfer import on_device
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.routing import expert_metrics, loads


class Balancing:
    """Of one model; a dense one has no load and no metrics.

    Args:
        model: the policy.
        config: the section `loss.experts`.
        parallel: sums over ranks.

    Raises:
        ConfigError: a loss of routers, and the model has none, or none whose choices are known.
    """

    def __init__(self, model: LanguageModel, config: ExpertsConfig, parallel: Parallel) -> None:
        self._model, self._config, self._parallel = model, config, parallel
        self._routers = model.routers
        self._routers.observed = True
        self._routers.adds = config.balance_coef > 0 or config.z_coef > 0
        for key, value in (("balance_coef", config.balance_coef), ("z_coef", config.z_coef)):
            if value > 0 and not len(self._routers):
                kind = str(model.config["model_type"])
                raise ConfigError(
                    f"loss.experts.{key} = {value} is for a mixture of experts, but model.path holds {model.name} "
                    f"({kind}), which has no routers that are known here",
                    hint=f"leave loss.experts.{key} out",
                    key=f"loss.experts.{key}",
                    got=kind,
                )
        self._total = 0.0
        self._sums: Tensor | None = None
        self._coefs: Tensor | None = None
        self._load: Tensor | None = None
        self._open = False

    def begin(self, batch: TrainBatch, micros: Sequence[MicroBatch], *, learns: bool) -> None:
        """Before an optimizer step over these micro-batches of this rank; all ranks call it."""
        if not len(self._routers):
            return
        self.end()
        micros = [self._model.share(micro).micro for micro in micros]
        own = sum(int(micro.copies.sum()) for micro in micros)
        self._total = float(self._parallel.sum(torch.tensor([own], dtype=torch.float64)))
        self._coefs = self._load = None
        if not (learns and self._routers.adds):
            return
        experts, whole = self._routers.experts, max(self._total, 1.0)
        like = self._weights(micros[0]) if micros else torch.zeros(1)
        self._coefs = like.new_tensor([self._config.balance_coef * experts / whole, self._config.z_coef / whole])
        self._load = like.new_zeros(len(self._routers), experts)
        if self._config.balance_coef > 0:
            with torch.no_grad():
                for micro in micros:
                    self._next(batch, micro)
                    self._model.states(micro)
            self._load.copy_(loads(self._everyones(), whole, self._routers.per_token))
            self._sums = None

    def at(self, batch: TrainBatch, micro: MicroBatch) -> None:
        """Before each forward and backward pass of the step."""
        if len(self._routers):
            self._next(batch, self._model.share(micro).micro, self._coefs, self._load)

    def metrics(self) -> dict[str, float]:
        """Of the step, behind its last backward pass; equal on all ranks, who all call it."""
        if not len(self._routers):
            return {}
        found = expert_metrics(self._everyones(), self._total, self._routers.per_token)
        self.end()
        return found

    def end(self) -> None:
        """Nothing is asked of the routers from here on."""
        self._routers.tell(None)
        self._routers.free()
        self._open, self._sums = False, None

    def _next(self, batch: TrainBatch, micro: MicroBatch, coefs: Tensor | None = None, load: Tensor | None = None) -> None:
        self._take()
        self._routers.tell(self._weights(micro), coefs, load)
        self._routers.route(batch, micro, self._model.device)
        self._open = True

    def _take(self) -> None:
        """Add what the pass before has found."""
        if self._open:
            found = self._routers.told().double()
            self._sums = found if self._sums is None else self._sums + found
        self._open = False

    def _everyones(self) -> Tensor:
        """[L, 2 E + 1] float64 on the host, over all passes and ranks."""
        self._take()
        shape = (len(self._routers), 2 * self._routers.experts + 1)
        return self._parallel.sum(torch.zeros(shape, dtype=torch.float64) if self._sums is None else self._sums.cpu())

    def _weights(self, micro: MicroBatch) -> Tensor:
        wide = self._model.dtype == torch.float64
        return on_device(micro.copies.ravel().astype(np.float64 if wide else np.float32), self._model.device)
