"""The configuration tree: one frozen struct per component, which gets its own sub-struct and nothing else.

Every field is documented with its unit; unknown keys are refused by `streamrl.config.load`. Derived values are functions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from streamrl.config.bounds import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveFraction, PositiveInt, Section
from streamrl.config.bus import BusConfig
from streamrl.config.data import DataConfig
from streamrl.config.engines import EngineConfig
from streamrl.config.evaluation import EvaluationConfig
from streamrl.config.filters import FiltersConfig
from streamrl.config.gateway import GatewayConfig
from streamrl.config.loss import LossConfig, estimator_of
from streamrl.config.metrics import MetricsConfig, PageConfig, SloConfig
from streamrl.config.ray import RayConfig
from streamrl.config.reward import RewardConfig
from streamrl.config.slime import SlimeConfig
from streamrl.config.weights import WeightsConfig
from streamrl.schemas.subjects import check_name
from streamrl.schemas.tasks import Sampling


class RunConfig(Section, frozen=True, kw_only=True):
    """What is run, for how long, and where its files go."""

    name: str = "run"
    """Run id: letters, digits, '_' and '-'; of a new run at most 128."""
    kind: Literal["rl", "sft"] = "rl"
    """Reinforcement learning; or supervised fine-tuning (docs/sft.md): the rows' own answers are trained on, over the same bus."""
    dir: str = "runs"
    """Directory that holds the run directories."""
    kernels: str = ""
    """Folder of the kernels that Triton, torch, FlashInfer and SGLang compile, which later runs use again; empty: a folder in the
    user's cache ($XDG_CACHE_HOME, or ~/.cache). A library's own variable, such as TRITON_CACHE_DIR, goes before it."""
    seed: int = 0
    """Seed of everything random in the run."""
    steps: PositiveInt = 100
    """Batches to train, warm-up not counted; the run ends then."""
    max_seconds: NonNegativeFloat = 0.0
    """End after this many seconds of training, all sessions together, warm-up not counted; 0: no limit."""
    until_reward: float = 0.0
    """End once the mean reward of the last 20 batches reaches this; 0: never."""
    numerics: Literal["fast", "bitwise"] = "fast"
    """What a re-derived step that gives other digits does: fork the epoch (fast) or stop with Diverged (bitwise)."""

    def __post_init__(self) -> None:
        check_name("run name", self.name)


class ModelConfig(Section, frozen=True, kw_only=True):
    """The policy's architecture and where its weights come from."""

    path: str = ""
    """Hugging Face model directory (config, weights, tokenizer), or a name of the Hub such as `Qwen/Qwen3-0.6B`. Empty: a small Qwen3 and
    its tokenizer are built."""
    hidden: PositiveInt = 128
    """Width of the built model."""
    layers: PositiveInt = 2
    """Depth of the built model."""
    heads: PositiveInt = 4
    """Query heads of the built model."""
    kv_heads: PositiveInt = 2
    """Key-value heads of the built model."""
    intermediate: PositiveInt = 384
    """Feed-forward width of the built model."""
    max_len: Annotated[int, Meta(ge=2)] = 256
    """Longest sequence in tokens, prompt included."""
    vocab_size: int = 0
    """Tokens of the built model. 0: one a character; else byte-pair encoding of that many is trained on the training rows."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""


class TasksConfig(Section, frozen=True, kw_only=True):
    """How work is issued."""

    batch_tasks: PositiveInt = 64
    """B: tasks (groups) in a batch."""
    num_rollouts: PositiveInt = 8
    """Rollouts of a task that are trained (group size); `loss.advantage = "remax"` adds a greedy one, which is not."""
    max_staleness: NonNegativeInt = 1
    """S: a token may be at most this many versions old when trained on. 0: lockstep."""
    stale: Literal["drop", "mask", "wait"] = "drop"
    """What happens beyond max_staleness: drop the group, mask the old tokens, or wait for old tasks before closing a batch."""
    drop_zero_variance: bool = True
    """Drop groups whose rewards are all equal (their advantages are 0)."""
    overlong: Literal["train", "mask", "drop"] = "train"
    """Samples that a length limit truncated (status `truncated`): trained; masked, while their rewards still count in their groups
    (overlong filtering, arXiv 2503.14476); or their rollouts left out of their groups."""
    inexact: Literal["refuse", "mask", "allow"] = "mask"
    """Tokens whose versions are guesses, as SGLang without the plugin gives them, or that were drawn with penalties or a grammar, which the
    trainer does not compute: their rollouts are left out, they are masked, or they are trained as if their versions were known and as if
    the trainer's distribution were the one that they were drawn from."""
    check_max_len: bool = True
    """A message with a sample of more than model.max_len tokens is a dead letter."""
    expire_versions: NonNegativeInt = 0
    """A task with rollouts that have not ended this many versions after its grant ends as `expired`: its credit is given again, its work is
    cut short, and what still comes for it is `late`. More than max_staleness; 0: never. Not with stale = "wait" or in lockstep."""
    max_deliveries: PositiveInt = 4
    """A task ends as a tombstone once it has killed this many processes for user code, alone in each of them."""
    hold_ahead: bool = False
    """Just-in-time pacing: hold the issue of new tasks while one whole batch is ready (lower staleness; needs max_staleness >= 1)."""


class WarmupConfig(Section, frozen=True, kw_only=True):
    """Supervised warm-up on the training rows' labels, streamed over the same bus before reinforcement learning begins."""

    max_steps: NonNegativeInt = 0
    """Longest warm-up in batches; 0: none."""
    until: Annotated[float, Meta(le=1)] = 0.2
    """End once the smoothed probability of whole answers reaches this."""
    learning_rate: NonNegativeFloat = 2e-3
    """AdamW learning rate during the warm-up."""


class ProducerConfig(Section, frozen=True, kw_only=True):
    """Rollout producers started with the run."""

    function: str = "single_turn"
    """`single_turn`; a custom producer as `file.py:name`, `pkg.mod:name` or `pkg.mod.name`; or an environment of another library
    (docs/verifiers.md): `openenv:http://host:port`, `skyrl_gym:name`, `verifiers:taskset`."""
    python: str = ""
    """Interpreter of the environment that has the packages of `verifiers:taskset`, which conflict with others."""
    workers: NonNegativeInt = 1
    """Producer processes."""
    concurrency: PositiveInt = 64
    """Tasks that one worker has in flight."""
    children: NonNegativeInt = 0
    """Processes in which one worker runs user code (none without any); 0: one a core, at most 4."""
    idle_timeout_s: PositiveFloat = 30.0
    """A rollout whose code has had this long without an engine call begun, streaming or ended is over, as `timeout`. Time in which it waits
    for engine, version, bus or room does not count."""
    rollout_timeout_s: PositiveFloat = 3600.0
    """Longest that the code of one rollout may take in all, the same waiting left out."""
    max_calls: PositiveInt = 1000
    """Engine calls of one rollout's code; one more, and it is over, as `timeout`."""
    max_tokens: NonNegativeInt = 0
    """Tokens that engines may make for one rollout's code, which is then over likewise; 0: 32 times model.max_len."""
    silent_call_s: NonNegativeFloat = 120.0
    """An engine call is given up, and its rollout begun again, when it has had no token for so long while its engine made as many for
    each other call as it could have, or had none to make; a second time its rollout has failed. 0: never."""
    child_memory_bytes: NonNegativeInt = 8 << 30
    """Memory for data of one such process (RLIMIT_DATA): beyond it user code gets a MemoryError; 0: no limit."""
    options: dict[str, Any] = {}
    """Handed to the custom producer as `context.options`."""


class OptimizerConfig(Section, frozen=True, kw_only=True):
    """AdamW with a schedule of its rate over the batches of reinforcement learning (that of the warm-up is warmup.learning_rate)."""

    learning_rate: NonNegativeFloat = 6e-4
    """Peak rate."""
    schedule: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "linear"
    """After the rise the rate stays (`constant`), falls in equal parts (`linear`), along half a cosine (`cosine`) or in equal parts at the
    end alone (`wsd`, arXiv 2404.06395), or is the peak times sqrt(warmup_steps / step) (`inverse_sqrt`)."""
    final_fraction: Fraction = 0.3
    """The rate falls to this fraction of the peak, and never lower; not with `constant`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear rise from 0."""
    decay_steps: NonNegativeInt = 0
    """Length of the schedule in batches, rise included; then the rate stays at final_fraction. 0: run.steps. Not with `constant` and
    `inverse_sqrt`, which have no end."""
    cooldown_fraction: Fraction = 0.2
    """`wsd`: the last part of decay_steps, in which the rate falls."""
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """Decay of the mean of the gradients."""
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    """Decay of the mean of their squares."""
    eps: NonNegativeFloat = 1e-8
    """Added to the root of that mean."""
    weight_decay: NonNegativeFloat = 0.0
    """Part of a parameter that is taken away, times the rate."""
    clip_norm: NonNegativeFloat = 1.0
    """Global gradient norm is clipped to this; 0: not clipped."""
    ess_scaling: Literal["off", "sqrt", "linear"] = "off"
    """The rate of each optimizer step times the effective sample size of its rollouts over their number, or its root (VCPO, arXiv
    2602.17616): steps on batches that a few heavy weights lead are small. `sqrt` is for AdamW; demonstrations keep the rate."""
    ess_reference: PositiveFraction = 1.0
    """The effective fraction from which on the rate is the whole one: that of fresh rollouts."""


class TrainerConfig(Section, frozen=True, kw_only=True):
    """The training backend."""

    name: str = "main"
    """Name of this trainer: its ledger and its position are kept under it."""
    backend: Literal["torch", "megatron", "table"] = "torch"
    """`torch`: a Hugging Face model. `megatron`: a Qwen, Qwen3-MoE or Llama by megatron-core
    (docs/megatron.md). `table`: the tabular policy of engine.kind = "table", without any framework."""
    ranks: PositiveInt = 1
    """Processes that share each batch and sum their gradients (over gloo, on GPUs over NCCL); not with `table`."""
    shards: PositiveInt = 1
    """Parts that parameters, gradients and optimizer state are cut into (FSDP2), for ranks / shards copies; 1: each rank holds all."""
    tensor: PositiveInt = 1
    """Parts that each matrix is cut into (tensor and sequence parallel); with `megatron` only. Replicas are ranks / (tensor x pipeline)."""
    pipeline: PositiveInt = 1
    """Stages, one behind another, that have equally many layers each (pipeline parallel, 1F1B); with `megatron` only."""
    experts: PositiveInt = 1
    """Parts that a mixture's experts are divided into, over neighbouring ranks, which send tokens to each other (expert parallel); with
    `megatron` only."""
    context: PositiveInt = 1
    """Ranks that share each packed row, each with its part of the positions and keys of all (context parallelism): what a sample's
    activations take of a GPU is cut by as many. micro_tokens are of the row. Rows are packed then."""
    gather: Literal["auto", "step", "micro_batch"] = "auto"
    """How long the layers of a model that is cut stay gathered: `micro_batch` sends more, `step` holds all and its gradient meanwhile.
    `auto`: a step where that is a quarter of the GPU's memory at most, and on CPUs."""
    rank_timeout_s: Annotated[float, Meta(ge=1)] = 300.0
    """Longest that a rank waits for another, to come or within a step; then all are restarted."""
    threads: PositiveInt = 1
    """CPU threads of one rank."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained; `auto`: on a GPU if there is one."""
    gpu: NonNegativeInt = 0
    """Index of the GPU among those this process sees; rank r takes gpu + r."""
    dtype: Literal["", "float32", "bfloat16"] = ""
    """Type of the parameters that are trained and published, the same as the engines'; empty: model.dtype. With `bfloat16` the optimizer
    updates float32 masters and rounds them: 18 bytes a parameter while training, 14 in a checkpoint."""
    attention: Literal["auto", "packed", "sdpa", "flash"] = "auto"
    """`packed`: samples one behind another in rows of up to micro_tokens, by torch's attention of variable length. `sdpa`: torch's
    attention under masks; a group's prompt is shared. `flash`: FlashAttention, an own package; one sample a row. `auto`: packed on a GPU
    in bfloat16, else sdpa."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Whether layers are compiled (torch.compile), once a run, for packed rows only. `auto`: on a GPU, unless run.numerics is bitwise or
    tensor is above 1."""
    activations: Literal["auto", "all"] | NonNegativeInt = "auto"
    """How many layers, the last ones, keep what they computed for the backward pass; the others keep their input and are run again there:
    less memory, for none kept a third more work, the same digits. `auto`: on a GPU as many as its memory is enough for, on a CPU `all`."""
    minibatches: PositiveInt = 1
    """Optimizer steps a batch."""
    micro_tokens: PositiveInt = 16384
    """Tokens of one forward and backward pass; halved where that is out of memory."""
    routing_replay: bool = False
    """Send each token of a mixture to the experts that the engine sent it to (R3, arXiv 2510.11370)."""
    support_replay: bool = False
    """Normalise over the very tokens that top_p, top_k and min_p left the engine to draw from, in place of those that they leave of each
    model's own distribution (docs/sampling.md)."""
    check_logprobs: NonNegativeInt = 0
    """Rollouts of each batch whose log-probs are computed once more with the very weights that sampled them, to tell rounding from drift;
    keeps tasks.max_staleness + 1 copies of the parameters, and one in float32 for a moment. 0: where those are the newest, and a few of one
    version in 16, on a GPU in 64, a copy of which waits in the host's memory (torch only)."""
    max_unlearned: NonNegativeInt = 8
    """The run ends as failed once this many more batches had advantages and no gradient, or one that is not finite, than gave the policy
    something to learn; 0: never. Batches whose tokens are all clipped are not counted."""
    gradient_cosine: bool = False
    """Measure the cosine between the gradients of consecutive optimizer steps (`train/grad_cosine`), which keeps a copy of the gradient:
    4 bytes a parameter."""
    optimizer: OptimizerConfig = OptimizerConfig()
    checkpoint_every: PositiveInt = 50
    """Batches between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """Older ones are removed; the sample stream is held for those that are kept, and where it is full fewer are."""
    token_weights_bytes: NonNegativeInt = 64_000_000
    """Bytes of the run directory that hold log-prob, importance weight and advantage of each trained token, of the newest batches, for the
    page; 0: none."""
    export_every: NonNegativeInt = 0
    """Versions between model directories in hf/, written while training waits, and one more when the run is stopped; none is removed.
    0: only once the warm-up has ended and at the run's end."""

    @property
    def tabular(self) -> bool:
        """Whether it trains tabular policies, without any framework: nobody else asks for the backend by name."""
        return self.backend == "table"

    def __post_init__(self) -> None:
        check_name("trainer name", self.name)


class SuperviseConfig(Section, frozen=True, kw_only=True):
    """Restarts."""

    max_restarts: NonNegativeInt = 10
    """Restarts of one worker within a window before the run is given up."""
    window_s: NonNegativeFloat = 300.0
    """Length of that window."""
    backoff_s: NonNegativeFloat = 0.5
    """First pause before a restart; doubles up to 30 s."""
    drain_s: NonNegativeFloat = 30.0
    """Time workers get to stop by themselves."""
    silent_s: NonNegativeFloat = 60.0
    """A worker that has loaded and whose event loop has not turned for this long writes its stacks to its log, is killed, and started
    again; 0: never."""
    max_failed_batches: NonNegativeInt = 3
    """The run ends as failed once this many batches' worth of tasks have failed without one trained batch in between, unless a producer at
    work has failed less than its share of them; 0: never."""
    max_failed_share: Fraction = 0.5
    """The run ends as failed once a greater part than this of the last rollouts (256, or two batches if that is more) have failed or timed
    out; a producer of the run that does so beside others that do not is drained instead; 1: never."""


class DebugConfig(Section, frozen=True, kw_only=True):
    """For experiments: things that no run wants for itself."""

    delay_versions: NonNegativeInt = 0
    """k: engines serve the version k before the newest one, on purpose; takes k of the tasks.max_staleness versions."""
    token_delay_s: NonNegativeFloat = 0.0
    """Mean artificial seconds of a token (table engine only); 0: none."""
    token_delay_sigma: NonNegativeFloat = 1.0
    """Spread of the artificial delay over completions, as the standard deviation of its logarithm: 1.5 gives heavy tails."""
    memory_tokens: NonNegativeInt = 0
    """A forward pass of the trained model over more row positions than this is out of memory (torch trainer only); 0: never."""
    memory_ranks: tuple[NonNegativeInt, ...] = ()
    """Ranks of the trainer that debug.memory_tokens is for; empty: all of them."""
    profile_versions: tuple[PositiveInt, ...] = ()
    """Numbers of versions whose training step is written to profile/ in the run directory: a Chrome trace, and on a GPU the history of its
    memory (torch trainer only)."""


class Config(Section, frozen=True, kw_only=True):
    """The whole tree."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    tasks: TasksConfig = TasksConfig()
    sampling: Sampling = Sampling()
    warmup: WarmupConfig = WarmupConfig()
    producer: ProducerConfig = ProducerConfig()
    gateway: GatewayConfig = GatewayConfig()
    reward: RewardConfig = RewardConfig()
    filters: FiltersConfig = FiltersConfig()
    slime: SlimeConfig = SlimeConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    loss: LossConfig = LossConfig()
    weights: WeightsConfig = WeightsConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    bus: BusConfig = BusConfig()
    supervise: SuperviseConfig = SuperviseConfig()
    metrics: MetricsConfig = MetricsConfig()
    page: PageConfig = PageConfig()
    slo: SloConfig = SloConfig()
    ray: RayConfig = RayConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def group_size(self) -> int:
        """Rollouts of a task: those that are trained and, where the estimator asks for it, the greedy one."""
        return self.tasks.num_rollouts + int(estimator_of(self.loss).greedy)


def schedule_steps(config: Config) -> int:
    """Length of the learning rate's schedule in batches: `trainer.optimizer.decay_steps`, else `run.steps`, or the rise and one more."""
    optimizer = config.trainer.optimizer
    return optimizer.decay_steps or max(config.run.steps, optimizer.warmup_steps + 1)
