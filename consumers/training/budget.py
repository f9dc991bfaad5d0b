"""The budget of a micro-batch after a device was out of memory: kept on the bus, so that every later start, on all ranks, begins with it.

One rank that has written nothing repeats its step with half the budget by itself. Several ranks end: the one that was out of memory has
halved the budget here, rank 0 reads it when all have been started again, and tells the others with each batch. Versions that are in the
ledger are trained again by the budget that stands there; one whose step was out of memory by it, on another device than it was made on, is
trained by the smaller one, and has other digits then.
"""

from __future__ import annotations

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key
from streamrl.config.tree import TrainerConfig
from streamrl.schemas.codec import encode
from streamrl.schemas.control import MicroBudget
from streamrl.schemas.subjects import PREFIX_BUDGETS


async def read_budget(bus: Bus, trainer: TrainerConfig) -> MicroBudget:
    """`trainer.micro_tokens`, or what it was halved to; the latter counts until the former is changed."""
    known = await read_key(bus.kv, PREFIX_BUDGETS + trainer.name, MicroBudget)
    own = MicroBudget(trainer.micro_tokens, trainer.micro_tokens)
    return known if known is not None and known.configured == trainer.micro_tokens else own


async def lower_budget(bus: Bus, trainer: TrainerConfig, micro_tokens: int, number: int) -> tuple[MicroBudget, str]:
    """Keep a smaller budget after the step that was to make version `number`; returns it, and what people should know."""
    budget = MicroBudget(trainer.micro_tokens, micro_tokens, number)
    await bus.kv.put(PREFIX_BUDGETS + trainer.name, encode(budget))
    return budget, (
        f"the trainer was out of memory: it goes on with micro-batches of {micro_tokens} tokens "
        f"(trainer.micro_tokens is {trainer.micro_tokens}; another value is tried as it is)"
    )
