"""The budget of a micro-batch after a device was out of memory: kept on the bus, so that every later start, on all ranks, begins with it.

One rank that has written nothing repeats its step with half the budget by itself. Several ranks end: the one that was out of memory has
halved the budget here, rank 0 reads it when all have been started again, and tells the others with each batch. Versions that are in the
ledger are trained again by the budget that stands there.
"""

from __future__ import annotations

from streamrl.bus.protocol import Bus
from streamrl.bus.reading import read_key
from streamrl.config.tree import TrainerConfig
from streamrl.schemas.codec import encode
from streamrl.schemas.control import MicroBudget
from streamrl.schemas.subjects import PREFIX_BUDGETS


async def read_budget(bus: Bus, trainer: TrainerConfig) -> int:
    """`trainer.micro_tokens`, or what it was halved to; the latter counts until the former is changed."""
    known = await read_key(bus.kv, PREFIX_BUDGETS + trainer.name, MicroBudget)
    return known.micro_tokens if known is not None and known.configured == trainer.micro_tokens else trainer.micro_tokens


async def lower_budget(bus: Bus, trainer: TrainerConfig, micro_tokens: int) -> str:
    """Keep a smaller budget; returns what people should know."""
    await bus.kv.put(PREFIX_BUDGETS + trainer.name, encode(MicroBudget(trainer.micro_tokens, micro_tokens)))
    return (
        f"the trainer was out of memory: it goes on with micro-batches of {micro_tokens} tokens "
        f"(trainer.micro_tokens is {trainer.micro_tokens}; another value is tried as it is)"
    )
