"""What a bus benchmark is asked to do: which shapes of messages, over which transports, how often."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from streamrl.errors import ConfigError

MAX_ROUND_TOKENS = 100_000_000
"""A measurement stays below the byte budget of the sample stream, for nothing trims it meanwhile."""
SAMPLES = (1, 8, 64)
TOKENS = (256, 2048, 16384)


class Transport(StrEnum):
    """A way from a producer to a trainer, and the encoding on it."""

    STREAMRL = "streamrl"
    """Our publisher and our reader on JetStream with file storage; Arrow."""
    REDIS_ORJSON = "redis-orjson"
    """Redis streams without acks, one entry added and read at a time; lists as JSON."""
    REDIS_PICKLE = "redis-pickle"
    """The same; lists pickled."""
    ZMQ_MSGPACK = "zmq-msgpack"
    """PUSH and PULL over TCP; arrays of fields in MessagePack."""
    RAY = "ray"
    """An actor's results in the object store; numpy arrays, read in place."""


class Cell(msgspec.Struct, frozen=True):
    """One shape of message: `samples` rollouts of a task, `tokens` each."""

    samples: int
    tokens: int

    @property
    def name(self) -> str:
        """Such as `8 x 2k`."""
        short = self.tokens >= 1024 and self.tokens % 1024 == 0
        return f"{self.samples} x {self.tokens // 1024}k" if short else f"{self.samples} x {self.tokens}"

    @staticmethod
    def named(name: str) -> Cell:
        """The shape of that name."""
        samples, _, tokens = name.partition(" x ")
        return Cell(int(samples), int(tokens.removesuffix("k")) * (1024 if tokens.endswith("k") else 1))

    @property
    def place(self) -> tuple[int, int]:
        """Sorts by tokens, then by samples."""
        return self.tokens, self.samples


class BusOptions(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the benchmark."""

    samples: tuple[int, ...] = SAMPLES
    tokens: tuple[int, ...] = TOKENS
    transports: tuple[Transport, ...] = tuple(Transport)
    rounds: int = 5
    round_tokens: int = 16 << 20
    """Tokens that a shape sends in a round, as far as `max_tasks` and `min_tasks` let it."""
    min_tasks: int = 6
    max_tasks: int = 3000

    def __post_init__(self) -> None:
        for name in ("samples", "tokens", "transports"):
            if not getattr(self, name):
                raise ConfigError(f"bench bus: expected at least one of {name}, got none")
        if min(*self.samples, *self.tokens, self.rounds, self.round_tokens, self.min_tasks) < 1 or self.max_tasks < self.min_tasks:
            raise ConfigError("bench bus: expected samples, tokens, rounds and tasks of at least 1")
        if max(self.tokens) > 1 << 19:
            raise ConfigError(f"bench bus: expected samples that fit a message, got one of {max(self.tokens)} tokens")
        if max(self.round_tokens, self.min_tasks * max(self.samples) * max(self.tokens)) > MAX_ROUND_TOKENS:
            raise ConfigError(f"bench bus: expected at most {MAX_ROUND_TOKENS} tokens in a round, got more", hint="lower --round-tokens")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every shape."""
        return tuple(Cell(samples, tokens) for samples in self.samples for tokens in self.tokens)

    def num_tasks(self, cell: Cell) -> int:
        """Messages (tasks) of one measurement."""
        return min(self.max_tasks, max(self.min_tasks, self.round_tokens // (cell.samples * cell.tokens)))
