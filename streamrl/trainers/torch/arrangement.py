"""What a trainer chooses of how its models are run: compiled or not, and how many layers keep their activations.

Chosen when the trainer is made, before anything is trained, and the same on all ranks: each says what it can, and the least of it is
done. A batch that was trained before names what was chosen then, which is done again, unless the configuration says otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from streamrl.core.packing import ROW
from streamrl.errors import ConfigError
from streamrl.schemas.ledger import Choices
from streamrl.trainers.activations import (
    Cut,
    ModelShape,
    gathered_bytes,
    held_bytes,
    looked_at_bytes,
    model_shape,
    training_bytes,
)
from streamrl.trainers.torch.kernels import Kernels
from streamrl.trainers.torch.language_model import LanguageModel
from streamrl.trainers.torch.layers import first_line
from streamrl.trainers.torch.parallel import Parallel
from streamrl.trainers.torch.reproducible import reproducible

logger = logging.getLogger(__name__)


class Arranged(NamedTuple):
    """How the models are run."""

    compiled: bool
    kept: int | None
    """See `CausalLM.arrange`."""


class Room(NamedTuple):
    """Of a device, before the first step."""

    shapes: Sequence[ModelShape]
    """Of the models that are trained."""
    free: int
    """Bytes."""
    needed: int
    """Bytes of it that gradients, moments and snapshots will take."""


class Arrangement:
    """Of all models of one trainer.

    Args:
        kernels: what the configuration asks for.
        trained: the policy first, then the body of the critic where there is one.
        frozen: models that are only looked at.
        parallel: the ranks.
        budget: positions of a forward and backward pass.
        deterministic: refuse kernels that are not reproducible.
        copies: of the policy's parameters, or of this rank's part, that are still to be made.

    Raises:
        ConfigError: the configuration asks for packed rows or compiled layers by name, and a model cannot be run on packed rows.
    """

    def __init__(
        self,
        kernels: Kernels,
        *,
        trained: Sequence[LanguageModel],
        frozen: Sequence[LanguageModel],
        parallel: Parallel,
        budget: int,
        deterministic: bool,
        copies: int,
    ) -> None:
        self._kernels = kernels
        self._trained = trained
        self._frozen = frozen
        self._parallel = parallel
        self._deterministic = deterministic
        self._notices: list[str] = []
        self._why = ""
        """Why nothing can be compiled, once that has been tried."""
        self._attention = kernels.attention
        # Where ranks share rows, also of a model that is only looked at: each has a part of them.
        asked = [*trained, *(frozen if parallel.context is not None else [])]
        shared = parallel.context is not None
        if kernels.attention == "packed" and (others := [one for one in asked if not one.packs or (shared and one.windowed)]):
            self._attention = "sdpa"
            self._say_not_packed(others[0].name)
        self._room = self._reckon(copies) if kernels.kept_layers == "auto" else None
        self._most: int | None = None
        """No more layers keep their activations since memory ran out."""
        self._reckoned: dict[int, int | None] = {}
        """Layers that keep their activations, by the rows' length."""
        compiled = kernels.compile and all(model.packs for model in trained)
        self._now = Arranged(False, None)
        # Long rows where they cost nothing: a short one takes the host as long to prepare.
        self._row_length = parallel.mesh.whole(budget if self._kept(budget) is None else min(budget, ROW))
        self._arrange(Arranged(compiled, self._kept(self._row_length)))
        self._compiled = self._now.compiled

    def least_row(self, recorded: Choices | None) -> int:
        """Length of packed rows where no sample is longer."""
        return (recorded.row_length if recorded is not None else 0) or self._row_length

    def follow(self, recorded: Choices | None, row_length: int) -> None:
        """Before a batch: run the models as it was trained before, or as this trainer chooses for rows of this length.

        Every rank is told the same.
        """
        compiled, kept = self._compiled, self._kept(row_length)
        if recorded is not None and self._kernels.free_compile:
            compiled = recorded.compiled
        if recorded is not None and self._kernels.kept_layers == "auto":
            # No more than fit here, which may be another machine: no digit depends on it.
            kept = _fewer(kept, recorded.kept_layers)
        if (wanted := Arranged(compiled, kept)) != self._now:
            self._arrange(wanted)

    def keep_fewer(self) -> bool:
        """Memory has run out: half as many layers keep their activations from here on. False where none does, or it was configured."""
        layers = self._trained[0].num_layers
        kept = layers if self._now.kept is None else self._now.kept
        if self._room is None or not kept:
            return False
        self._most = kept // 2
        self._notices.append(f"out of memory: {self._most} of {layers} layers keep their activations from here on, {kept} did")
        logger.warning("event=fewer_activations kept=%d before=%d", self._most, kept)
        self._arrange(self._now._replace(kept=self._most))
        return True

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
        if compiled and not self._now.compiled and not self._compiles():
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
        reasons = [f"{model.name}: {why}" for model, why in found if why]
        if not any(self._parallel.gather(len(reasons))):
            return True
        self._why = reasons[0] if reasons else "another rank cannot"
        self._notices.append(f"the layers are not compiled, so that training is slower: {self._why}")
        logger.warning("event=not_compiled why=%s", self._why)
        return False

    def _kept(self, row_length: int) -> int | None:
        kept = self._kernels.kept_layers
        if kept is None or (kept == "auto" and self._room is None):
            return None
        if kept != "auto":
            return None if kept >= self._trained[0].num_layers else kept
        assert self._room is not None
        if row_length not in self._reckoned:
            policy, room = self._trained[0], self._room
            estimate = (self._parallel.cut or Cut()).least_kept(
                room.shapes,
                free_bytes=room.free,
                needed_bytes=room.needed,
                tokens=-(-row_length // self._parallel.mesh.context),
                context=self._parallel.mesh.context,
                itemsize=policy.dtype.itemsize,  # parameters that are cut are kept in float32
                compiled=self._kernels.compile and policy.packs,
            )
            self._notices.append(estimate.text)
            logger.info("event=activations row=%d kept=%d of=%d %s", row_length, estimate.kept, policy.num_layers, estimate.text)
            self._reckoned[row_length] = None if estimate.all_kept else estimate.kept
        return _fewer(self._reckoned[row_length], self._most)

    def _reckon(self, copies: int) -> Room | None:
        """The memory that is there, of the rank that has the least; None where the shape or the layers are not known."""
        policy = self._trained[0]
        found = [model_shape(model.config) for model in self._trained]
        least = self._parallel.free_bytes()
        if found[0] is None or not policy.num_layers:
            return None
        shapes = [shape or found[0] for shape in found]
        if self._parallel.cut is not None:  # each rank holds boxes in float32, and gradients and moments of them are still to come
            held = [sum(p.numel() for _, p in model.parameters()) for model in self._trained]
            return Room(shapes, least, -self._parallel.least(-(12 * sum(held) + copies * held[0] * policy.dtype.itemsize)))
        needed, itemsize, shards = 0, policy.dtype.itemsize, self._parallel.mesh.shard
        for model, shape in zip(self._trained, [shapes[0], *(shape.body for shape in shapes[1:])], strict=True):
            numbers = sum(p.numel() for _, p in model.parameters())  # of the whole, also where it is cut
            needed += training_bytes(numbers, itemsize, shards) - held_bytes(numbers, itemsize, shards)
            if shards > 1:
                needed += gathered_bytes(shape, itemsize, once=model.gathers_once)
        if shards > 1:  # one at a time, while nothing else is run
            looked_at = [model_shape(model.config) or shapes[0] for model in self._frozen]
            needed += max((looked_at_bytes(shape, itemsize) for shape in looked_at), default=0)
        size = -(-sum(p.numel() for _, p in policy.parameters()) // shards) * itemsize
        return Room(shapes, least, needed + copies * size)

    def _say_not_packed(self, model: str) -> None:
        asked = [] if self._kernels.free_attention else ["trainer.attention = 'packed'"]
        context = self._parallel.mesh.context
        asked += [f"trainer.context = {context}"] if context > 1 else []
        asked += [] if self._kernels.free_compile or not self._kernels.compile else ["trainer.compile = 'on'"]
        rows = "rows that ranks share" if context > 1 else "packed rows"
        why = f"{model} cannot be run on {rows}: some of its layers do not attend to all that is before a token"
        if asked:
            key = asked[0].split()[0]
            hint = "set trainer.context = 1" if context > 1 else f"set {key} = 'auto'"
            raise ConfigError(f"{asked[0]}, but {why}", hint=hint, key=key, got=model)
        self._notices.append(f"rows are not packed and layers not compiled, so that training is slower: {why}")


def _fewer(one: int | None, other: int | None) -> int | None:
    """Of two numbers of layers, where None is all of them."""
    return other if one is None else one if other is None else min(one, other)
