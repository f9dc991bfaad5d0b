"""What `bench gateway` runs: a whole run under `up` whose producers are agents, and calls at a fixed rate."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.config.gateway import GatewayConfig
from streamrl.config.tree import (
    Config,
    DataConfig,
    EngineConfig,
    ModelConfig,
    PageConfig,
    ProducerConfig,
    RunConfig,
    TasksConfig,
    TrainerConfig,
)
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling

ENGINE, GATEWAY = "the engine itself", "through the gateway"
NUM_ROLLOUTS = 8
_BATCH_TASKS = 16


class GatewaySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    rounds: int = 5
    """Each makes its calls to the engine, and then through the gateway."""
    sessions: int = 1000
    """Open meanwhile; calls go round among them."""
    rate: float = 100.0
    """Calls a second, whether those before are answered or not."""
    seconds: float = 10.0
    """Of each half of a round."""
    tokens: int = 8
    """Of an answer."""

    def __post_init__(self) -> None:
        if min(self.rounds, self.sessions, self.tokens) < 1 or not (self.rate > 0 and self.seconds > 0):
            raise ConfigError(
                f"expected rounds, sessions, calls and tokens, got {self.rounds} rounds, {self.sessions} sessions, {self.rate:g} calls/s "
                f"for {self.seconds:g} s and {self.tokens} tokens",
                hint="for example --rounds 1 --sessions 50 --seconds 2",
            )

    @property
    def calls(self) -> int:
        """Of each half of a round."""
        return max(1, round(self.rate * self.seconds))


def config_of(spec: GatewaySpec, directory: Path) -> Config:
    """A run with credits for that many sessions, none of which ends."""
    tasks = -(-spec.sessions // NUM_ROLLOUTS)
    turns = -(-spec.calls * spec.rounds // spec.sessions) + 2
    return Config(
        run=RunConfig(name="gateway", dir=str(directory / "runs"), steps=1000),
        model=ModelConfig(max_len=64 + turns * (spec.tokens + 16)),
        data=DataConfig(train=str(directory / "train.jsonl"), max_prompt_tokens=16),
        tasks=TasksConfig(batch_tasks=_BATCH_TASKS, num_rollouts=NUM_ROLLOUTS, max_staleness=-(-tasks // _BATCH_TASKS)),
        sampling=Sampling(max_new_tokens=spec.tokens, ignore_eos=True),
        producer=ProducerConfig(workers=0),
        gateway=GatewayConfig(workers=1, max_sessions=spec.sessions + NUM_ROLLOUTS, idle_timeout_s=86_400.0),
        engine=EngineConfig(kind="table", slots=256),
        trainer=TrainerConfig(backend="table"),
        page=PageConfig(enabled=False),
    )
