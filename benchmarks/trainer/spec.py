"""What `bench trainer` measures: the batch, the contenders, and the configuration that the product's trainer gets."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

import msgspec

from benchmarks.shapes import SHAPES, Shape, find_shape, num_elements, shape_of
from streamrl.config.bounds import refuse
from streamrl.config.check_files import field
from streamrl.config.load import override
from streamrl.config.tree import Config, DataConfig, ModelConfig, OptimizerConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling

LEARNING_RATE = 1e-6
LONGEST = 16_384
"""Tokens of a sample at most, prompt included."""
SPREAD = 0.8
"""Standard deviation of the logarithm of an answer's length."""


MODEL = "model"
"""In place of a contender: its process writes the model that all train."""
_OWN_OPTIONS = {
    "trainer.ranks": "use --ranks",
    "trainer.threads": "use --threads",
    "trainer.device": "use --device",
    "trainer.dtype": "it is the shape's",
    "model.dtype": "it is the shape's",
}
"""Keys that `--set` may not change: report and contenders go by the benchmark's own options."""


class Contender(StrEnum):
    """Who trains."""

    OURS = "streamrl"
    """The product's trainer, as `up` would make it from its configuration."""
    PLAIN = "plain"
    """A loop of its own on one rank: packed rows of one length, torch's attention, compiled layers and head."""
    TRL = "trl"
    """TRL's GRPO loss on prepared inputs, on one rank; where trl is installed."""


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark."""

    shape: str = "tiny"
    answers: tuple[int, ...] = ()
    """Mean tokens of an answer, a batch for each; none: those of the shape's size."""
    contenders: tuple[Contender, ...] = (Contender.OURS, Contender.PLAIN, Contender.TRL)
    ranks: int = 1
    """Of the product's trainer."""
    prompt_tokens: int = 0
    """0: by the shape's size."""
    batch_tokens: int = 0
    """About as many of a batch, prompts of all rollouts included; 0: by the shape's size."""
    rollouts: int = 8
    """Samples of a group, which have one prompt."""
    rounds: int = 2
    """Each runs every contender once, in a process of its own."""
    steps: int = 2
    """That are measured in each of these processes, after one that is not."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 1
    """CPU threads of each rank."""
    settings: tuple[str, ...] = ()
    """Overrides `a.b=c` of the product's configuration."""
    compiled: Literal["auto", "on", "off"] = "auto"
    """Whether the plain loop compiles its layers and its head; `auto`: on a GPU."""
    kept_layers: int = -1
    """Layers of the plain loop that keep their activations; -1: as many as the memory that is there should hold."""
    seed: int = 0
    model_dir: str = ""
    """Where the model is kept for other runs of the same shape; empty: it goes with this one."""

    def __post_init__(self) -> None:
        counts = {
            "--rounds": self.rounds,
            "--steps": self.steps,
            "--ranks": self.ranks,
            "--rollouts": self.rollouts,
            "--threads": self.threads,
        }
        for option, number in counts.items():
            if number < 1:
                raise ConfigError(f"{option}: expected at least 1, got {number}", option=option, got=number)
        least = {"--prompt": self.prompt_tokens, "--batch-tokens": self.batch_tokens, "--kept-layers": self.kept_layers + 1}
        for option, number in least.items():
            if number < 0:
                raise ConfigError(f"{option}: expected no negative number, got {number}", option=option, got=number)
        if not self.contenders:
            raise ConfigError("--contenders: expected at least one", option="--contenders")

    @property
    def dtype(self) -> str:
        """Of the parameters."""
        return shape_of(self.shape).dtype


def named_shape(text: str) -> str:
    """Return the name of a shape that a GPU has room to train, written in any case; raises ConfigError."""
    found = find_shape(text)
    if found is None or found.tensor_parallel > 1:
        fit = ", ".join(name for name, shape in SHAPES.items() if shape.tensor_parallel == 1)
        raise ConfigError(f"--shape: expected one of {fit}, got {text!r}", option="--shape", got=text)
    return found.name


def resolved(spec: TrainerSpec) -> TrainerSpec:
    """The same with every size that was left open; raises ConfigError for a batch that the shape cannot have."""
    tiny = spec.shape.startswith("tiny")
    spec = msgspec.structs.replace(
        spec,
        answers=spec.answers or ((48, 160) if tiny else (1500, 8000)),
        prompt_tokens=spec.prompt_tokens or (32 if tiny else 300),
        batch_tokens=spec.batch_tokens or (2048 if tiny else 131_072),
    )
    for mean in spec.answers:
        longest = longest_sample(spec, mean)
        if mean < 8 or longest < spec.prompt_tokens + mean:
            raise ConfigError(
                f"--answers: expected means of at least 8 tokens that fit with prompts of {spec.prompt_tokens} into {longest}, got {mean}",
                hint=f"samples have at most {LONGEST} tokens, and the shape's positions",
                option="--answers",
                got=mean,
            )
    return spec


def longest_sample(spec: TrainerSpec, mean: int) -> int:
    """Tokens of a sample at most, for answers of this mean: four times the mean sample, as far as rows and positions reach."""
    return min(4 * (spec.prompt_tokens + mean), LONGEST, shape_of(spec.shape).max_positions)


def cell_name(shape: str, mean: int) -> str:
    """What the records of answers of this mean are about."""
    return f"{shape}, {mean}"


def about_cell(contender: str, cell: str) -> str:
    """What facts of a contender in a cell are about."""
    return f"{contender} ({cell})"


def our_config(spec: TrainerSpec) -> Config:
    """The configuration of the product's trainer: its defaults but for sizes and device, and what `settings` say.

    Raises:
        ConfigError: a setting that is none, or that contradicts the benchmark's own options.
    """
    longest = max(longest_sample(spec, mean) for mean in spec.answers)
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if spec.dtype == "bfloat16" else "float32"
    config = Config(
        model=ModelConfig(max_len=longest, dtype=dtype),
        data=DataConfig(train="none", max_prompt_tokens=spec.prompt_tokens),
        sampling=Sampling(max_new_tokens=longest - spec.prompt_tokens),
        trainer=TrainerConfig(
            ranks=spec.ranks,
            threads=spec.threads,
            device=spec.device,
            optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        ),
    )
    changed = override(config, spec.settings)
    for key, hint in _OWN_OPTIONS.items():
        refuse(
            (got := field(changed, key)) != (own := field(config, key)),
            f"--set {key}: expected {own!r} here, got {got!r}",
            hint=hint,
            key=key,
        )
    return changed


def row_length(longest: int) -> int:
    """Positions of a packed row of the plain loop: a power of two that holds the longest sample; 8,192 where that is shorter."""
    return max(min(8192, 4 * longest), 1 << (longest - 1).bit_length())


def layers_kept(shape: Shape, row: int, free_bytes: float) -> int:
    """Layers of the plain loop that can keep their activations in bfloat16.

    20 bytes a parameter are weights, float32 masters, their gradients, moments, and the gradients of one pass; 8 GB are the head's logits
    and what the allocator wastes. A compiled layer keeps about three inner activations of its MLP, four of its heads and six of its
    width; a mixture three inner ones and two of its width for each expert that a token meets.

    Args:
        shape: of the model.
        row: positions of a row.
        free_bytes: of the device, before the model is there.
    """
    queries = shape.heads * shape.head_dim
    met = shape.experts_per_token if shape.experts else 0
    inner = 3 * shape.expert_intermediate * met if shape.experts else 3 * shape.intermediate
    of_layer = 2 * row * (inner + 4 * queries + (6 + 2 * met) * shape.hidden)
    left = 0.95 * free_bytes - 20 * num_elements(shape) - 8e9
    return int(max(0.0, min(shape.layers, left / of_layer)))
