"""What `TorchTrainer` needs of a model: Hugging Face's (`CausalLM`) or one of another framework."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from streamrl.algorithms.divergences import Divergence
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import MicroBatch
from streamrl.trainers.flops import ModelFlops

if TYPE_CHECKING:
    from streamrl.trainers.torch.context import Share
    from streamrl.trainers.torch.parallel import Parallel
    from streamrl.trainers.torch.routing import Routers
    from streamrl.trainers.torch.sharding import Held


class LanguageModel(Protocol):
    """A causal language model that is trained, or looked at. Letters as in `streamrl.core.packing`, `V` vocabulary."""

    device: torch.device
    dtype: torch.dtype
    """That it computes in."""
    width: int
    """Of a hidden state."""
    vocab_size: int
    packs: bool
    """Whether it can be run on packed rows."""
    windowed: bool
    """True where some layers do not attend to all that is before a token, so that ranks cannot share its rows."""
    free_masks: bool
    """Whether several samples may stand in a row that is not packed, and share prompts."""
    name: str
    """Of its class, for people."""
    config: dict[str, Any]
    """Of its Hugging Face directory."""
    flops: ModelFlops | None
    """None: not known."""
    routers: Routers
    """Of a mixture of experts; none of another model."""

    @property
    def num_layers(self) -> int:
        """Layers that can be compiled and run again; 0 where they are not known."""
        ...

    @property
    def gathers_once(self) -> bool:
        """Whether the layers of a model that is cut stay gathered for a whole optimizer step."""
        ...

    def cut(self, parallel: Parallel, *, trained: bool) -> Held:
        """The parameters as this rank holds them; call it once, before the model is run. Without `trained` no gradient is computed."""
        ...

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Trained parameters by Hugging Face name; tied ones once, under their first name."""
        ...

    def predict(
        self, micro: MicroBatch, batch: TrainBatch, *, entropy_gradient: bool = False, divergence: Divergence | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probs [M] float32 of `micro.target`, with gradient, and entropies [M] float32, with one where it is asked for.

        With `divergence` also how far the policy has gone from the sampler by the tokens that this held for the likeliest, [M] float32.
        """
        ...

    def turns(self, micros: Sequence[MicroBatch], *, learns: bool) -> Iterable[MicroBatch]:
        """Micro-batches in their order, each when this rank may `predict` it; who asks for the next one has gone back through it.

        Of a model whose layers are on several ranks one rank is given them, and the others do their work within. With `learns` there is a
        backward pass.
        """
        ...

    def share(self, micro: MicroBatch) -> Share:
        """What this rank computes of a micro-batch: all, or its part of a row that ranks share."""
        ...

    def states(self, micro: MicroBatch) -> Tensor:
        """Hidden states [m, H] that predict `micro.target`; of a row that ranks share, `micro` is this rank's part."""
        ...

    def logits(self, micro: MicroBatch, batch: TrainBatch) -> Tensor:
        """All logits [M, V] float32 at `micro.target`, over the temperature, nothing cut off."""
        ...

    def accumulate(self, *, last: bool) -> None:
        """Call it before each micro-batch of an optimizer step."""
        ...

    def forget(self) -> None:
        """What `Held` has of the parameters was written: make anew whatever was made of it."""
        ...

    def arrange(self, *, compiled: bool, kept: int | None) -> None:
        """How it is run from here on: with compiled layers, and `kept` of them, the last ones, keep their activations; None: all."""
        ...

    def try_compiled(self, row_length: int, *, gradient: bool) -> str:
        """Why a row cannot be run with compiled layers, or an empty string."""
        ...

    def limit_memory(self, tokens: int) -> None:
        """From here on a pass over more row positions than this is out of memory."""
        ...

    def save_pretrained(self, directory: Path, parameters: Mapping[str, Tensor] | None) -> None:
        """Write weights, and what belongs to them, as transformers does; the weights of a model that is cut are given."""
        ...
