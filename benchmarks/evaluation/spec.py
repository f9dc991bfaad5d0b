"""What `bench eval` runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.config.tree import Config, DataConfig, EngineConfig, EvaluationConfig, ModelConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling

ALONE, EVALUATION = "the engine alone", "an evaluation"


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    engine: str = "table"
    """`table`, with an artificial time of a token, or `local`, with the quickstart's model."""
    problems: int = 10_000
    n: int = 16
    """Samples of each."""
    tokens: int = 4
    """Of each sample."""
    slots: int = 256
    token_ms: float = 20.0
    """Of the table engine: with 256 slots it gives 12,800 tokens/s."""
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.engine not in ("table", "local"):
            raise ConfigError(f"--engine: expected table or local, got {self.engine!r}", hint="sglang is measured by a run of its own")
        if min(self.problems, self.n, self.tokens, self.slots, self.rounds) < 1 or not self.token_ms >= 0:
            raise ConfigError(
                f"expected problems, samples, tokens, slots and rounds, got {self.problems} x {self.n} of {self.tokens} tokens in "
                f"{self.slots} slots, {self.rounds} rounds",
                hint="for example --problems 100 --n 4 --rounds 1",
            )

    @property
    def num_tokens(self) -> int:
        """Of a round: no sample ends by itself."""
        return self.problems * self.n * self.tokens


def config_of(spec: EvaluationSpec, directory: Path) -> Config:
    """One set of problems, of whose samples each has its length."""
    tabular = spec.engine == "table"
    return Config(
        model=ModelConfig(max_len=64 + spec.tokens),
        data=DataConfig(heldout=str(directory / "rows.jsonl"), max_prompt_tokens=63),
        engine=EngineConfig(kind="table" if tabular else "local", slots=spec.slots),
        trainer=TrainerConfig(backend="table" if tabular else "torch"),
        evaluation=EvaluationConfig(
            num_problems=spec.problems,
            n=spec.n,
            sampling=Sampling(temperature=1.0, max_new_tokens=spec.tokens, ignore_eos=True),
        ),
    )
