"""What a trainer chooses of how its models are run: compiled or not, and how many layers keep their activations.

Chosen when the trainer is made, before anything is trained, and the same on all ranks: each says what it can, and the least of it is
done. A batch that was trained before names what was chosen then, which is done again, unless the configuration says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from streamrl.errors import ConfigError
from streamrl.schemas.ledger import Choices
from streamrl.trainers.activations import Estimate, gathered_bytes, held_bytes, kept_layers, model_shape, training_bytes
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.layers import first_line
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.reproducible import reproducible

logger = logging.getLogger(__name__)


class Arranged(NamedTuple):
    """How the models are run."""

    compiled: bool
    kept: int | None
    """See `CausalLM.arrange`."""


class Arrangement:
    """Of all models of one trainer.

    Args:
        kernels: what the configuration asks for.
        trained: the policy first, then the body of the critic where there is one.
        frozen: models that are only looked at.
        parallel: the ranks.
        row_length: of packed rows with the whole budget.
        deterministic: refuse kernels that are not reproducible.
        snapshots: buffers of the size of the policy that are still to be made.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        trained: Sequence[CausalLM],
        frozen: Sequence[CausalLM],
        parallel: Parallel,
        row_length: int,
        deterministic: bool,
        snapshots: int,
    ) -> None:
        self._kernels = kernels
        self._trained = trained
        self._frozen = frozen
        self._parallel = parallel
        self._row_length = row_length
        self._deterministic = deterministic
        self._notices: list[str] = []
        self._why = ""
        """Why nothing can be compiled, once that has been tried."""
        self._attention = kernels.attention if trained[0].packs or kernels.attention != "packed" else "sdpa"
        kept = kernels.kept_layers
        if kept == "auto":
            kept = self._fitting(snapshots)
        self._own = Arranged(kernels.compile and all(model.packs for model in trained), kept)
        self._now = Arranged(False, None)
        self._arrange(self._own)
        self._own = self._now

    def follow(self, recorded: Choices | None) -> None:
        """Before a batch: run the models as it was trained before, or as this trainer has chosen. Every rank is told the same."""
        wanted = self._own
        if recorded is not None and self._kernels.free_compile:
            wanted = wanted._replace(compiled=recorded.compiled)
        if recorded is not None and self._kernels.kept_layers == "auto":
            wanted = wanted._replace(kept=recorded.kept_layers)
        if wanted != self._now:
            self._arrange(wanted)

    def choices(self, row_length: int) -> Choices | None:
        """For the ledger, with the length of the batch's packed rows, or 0; None where nothing is out of the ordinary."""
        found = Choices(attention=self._attention, compiled=self._now.compiled, kept_layers=self._now.kept, row_length=row_length)
        return None if found == Choices() else found

    def notices(self) -> tuple[str, ...]:
        """What people should know, each once."""
        found, self._notices = tuple(self._notices), []
        return found

    def _arrange(self, wanted: Arranged) -> None:
        models = [*self._trained, *self._frozen]
        kept = wanted.kept if wanted.kept is None else min(wanted.kept, *(model.num_layers for model in self._trained))
        compiled = wanted.compiled and not self._why
        for model in models:
            model.arrange(compiled=compiled, kept=kept if model in self._trained else None)
        if compiled and not self._compiles():
            compiled = False
            for model in models:
                model.arrange(compiled=False, kept=kept if model in self._trained else None)
        self._now = Arranged(compiled, kept)

    def _compiles(self) -> bool:
        """Whether all models can be, on all ranks."""
        try:
            with reproducible(self._deterministic), self._parallel.gathering():
                found = [(model, model.try_compiled(self._row_length, gradient=True)) for model in self._trained]
                found += [(model, model.try_compiled(self._row_length, gradient=False)) for model in self._frozen]
        except RuntimeError as error:  # of a model that is cut into parts alone
            memory = isinstance(error, torch.OutOfMemoryError)
            raise ConfigError(
                f"a row of {self._row_length} tokens cannot be run with compiled layers: {first_line(error)}",
                hint="lower trainer.micro_tokens or trainer.activations" if memory else "set trainer.compile = 'off'",
                key="trainer.micro_tokens" if memory else "trainer.compile",
            ) from error
        reasons = [f"{type(model.module).__name__}: {why}" for model, why in found if why]
        if not any(self._parallel.gather(len(reasons))):
            return True
        self._why = reasons[0] if reasons else "another rank cannot"
        self._notices.append(f"the layers are not compiled, so that training is slower: {self._why}")
        logger.warning("event=not_compiled why=%s", self._why)
        return False

    def _fitting(self, snapshots: int) -> int | None:
        policy = self._trained[0]
        estimate = self._estimate(policy, snapshots)
        wanted = policy.num_layers if estimate is None else estimate.kept
        kept = min(self._parallel.gather(wanted))
        if estimate is not None:
            self._notices.append(estimate.text)
            logger.info("event=activations kept=%d of=%d %s", kept, policy.num_layers, estimate.text)
        return None if kept >= policy.num_layers else kept

    def _estimate(self, policy: CausalLM, snapshots: int) -> Estimate | None:
        shape = model_shape(policy.module.config.to_dict())
        if shape is None or not policy.num_layers:
            return None
        free, _ = torch.cuda.mem_get_info(policy.device)
        free += torch.cuda.memory_reserved(policy.device) - torch.cuda.memory_allocated(policy.device)
        needed, itemsize, shards = 0, policy.dtype.itemsize, self._parallel.mesh.shard
        for model in self._trained:
            numbers = sum(p.numel() for _, p in model.parameters())  # of the whole, also where it is cut
            needed += training_bytes(numbers, itemsize, shards) - held_bytes(numbers, itemsize, shards)
            if shards > 1:
                needed += gathered_bytes(model_shape(model.module.config.to_dict()) or shape, itemsize, once=model.gathers_once)
        size = sum(p.numel() for _, p in policy.parameters()) * itemsize
        return kept_layers(
            shape,
            free_bytes=free,
            needed_bytes=needed + snapshots * size,
            tokens=self._row_length,
            itemsize=itemsize,
            compiled=self._kernels.compile and policy.packs,
        )
