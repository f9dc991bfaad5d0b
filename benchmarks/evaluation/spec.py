"""What `bench eval` runs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from streamrl.config.load import override
from streamrl.config.registry import ENGINES, EngineName
from streamrl.config.tree import Config, DataConfig, EngineConfig, EvaluationConfig, ModelConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling

ALONE, EVALUATION = "the engine alone", "an evaluation"


class EvaluationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    engine: EngineName = "table"
    """`table`, with an artificial time of a token; `local`, with the quickstart's model; `sglang`, a server with `model`."""
    model: str = ""
    """Hugging Face directory that SGLang serves."""
    changes: tuple[str, ...] = ()
    """`SECTION.KEY=VALUE`: keys of the configuration, such as engine.sglang.gpus."""
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
        if self.engine not in ENGINES:
            raise ConfigError(f"--engine: expected {', '.join(ENGINES)}, got {self.engine!r}")
        if bool(self.model) != (self.engine == "sglang"):
            raise ConfigError(
                f"expected --model with --engine sglang alone, got engine {self.engine} and model {self.model!r}",
                hint="scripts/gpu/one_gpu.py model 0.6B DIR makes one with random weights",
            )
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
    """One set of problems, of whose samples each has its length; raises ConfigError for changes that cannot be."""
    tabular, rows = spec.engine == "table", str(directory / "rows.jsonl")
    config = Config(
        model=ModelConfig(max_len=64 + spec.tokens, path=spec.model, dtype="bfloat16" if spec.model else "float32"),
        data=DataConfig(train=rows, heldout=rows, max_prompt_tokens=63),
        sampling=Sampling(max_new_tokens=spec.tokens),
        engine=EngineConfig(kind=spec.engine, slots=spec.slots),
        trainer=TrainerConfig(backend="table" if tabular else "torch"),
        evaluation=EvaluationConfig(
            num_problems=spec.problems,
            n=spec.n,
            sampling=Sampling(temperature=1.0, max_new_tokens=spec.tokens, ignore_eos=True),
        ),
    )
    return override(config, spec.changes)
