"""Flags of the loss, the optimizer, checkpoints, logs and debugging."""

from __future__ import annotations

from streamrl.bridges.slime.script.flag import Flag, mapped, near, nothing, refused

LOSS: tuple[Flag, ...] = (
    mapped(
        "--advantage-estimator",
        "text",
        "loss.advantage",
        "loss.policy",
        default="grpo",
        says="gspo and cispo are policy losses of grpo here",
    ),
    mapped("--loss-type", "text", "run.kind", "loss.slime_loss", default="policy_loss"),
    mapped("--custom-loss-function-path", "text", "loss.slime_loss", says="the same signature"),
    mapped("--eps-clip", "number", "loss.clip_low", default=0.2),
    mapped("--eps-clip-high", "number", "loss.clip_high", says="slime's default is --eps-clip"),
    mapped("--eps-clip-c", "number", "loss.dual_clip"),
    mapped("--value-clip", "number", "loss.critic.clip", default=0.2),
    mapped("--num-critic-only-steps", "whole", "loss.critic.only_steps", default=0),
    mapped("--critic-lr", "number", "loss.critic.learning_rate"),
    mapped("--kl-coef", "number", "loss.kl.reward_coef", default=0.0),
    mapped(
        "--use-kl-loss",
        "switch",
        "loss.kl.loss_coef",
        says="with a coefficient of 0 slime computes the KL to report it; here it is left out",
    ),
    mapped("--kl-loss-coef", "number", "loss.kl.loss_coef", default=0.0),
    mapped("--kl-loss-type", "text", "loss.kl.estimator", default="k1"),
    mapped("--use-unbiased-kl", "switch", "loss.kl.unbiased"),
    mapped("--ref-update-interval", "whole", "loss.kl.reference_every"),
    mapped("--entropy-coef", "number", "loss.entropy_coef", default=0.0),
    mapped("--gamma", "number", "loss.gamma", default=1.0),
    mapped("--lambd", "number", "loss.gae_lambda", default=1.0),
    mapped("--normalize-advantages", "switch", "loss.whiten"),
    mapped("--disable-grpo-std-normalization", "switch", "loss.normalize_std"),
    mapped("--disable-rewards-normalization", "switch", "loss.normalize_rewards"),
    mapped("--calculate-per-token-loss", "switch", "loss.reduction"),
    mapped("--use-rollout-logprobs", "switch", "loss.proximal"),
    mapped("--use-tis", "switch", "loss.correction.kind", says="without it there is no correction"),
    mapped("--tis-clip", "number", "loss.correction.high", default=2.0),
    mapped("--tis-clip-low", "number", "loss.correction.low", default=0.0),
    mapped("--use-opsm", "switch", "loss.opsm_delta"),
    mapped("--opsm-delta", "number", "loss.opsm_delta", default=1e-4),
    mapped("--use-opd", "switch", "loss.distillation.coef"),
    mapped("--opd-type", "text", "loss.distillation.teacher", says="megatron; a teacher on a server is refused"),
    mapped("--opd-kl-coef", "number", "loss.distillation.coef", default=1.0),
    near(
        "--opd-teacher-load",
        "text",
        "loss.distillation.teacher",
        says="a Hugging Face directory: convert Megatron's with `streamrl convert`",
    ),
    mapped("--use-rollout-routing-replay", "switch", "trainer.routing_replay"),
    near(
        "--use-routing-replay",
        "switch",
        "trainer.routing_replay",
        says="the experts that the engine chose are taken, not those of the trainer's first pass",
    ),
    *nothing("advantages are not computed for fine-tuning", "--disable-compute-advantages-and-returns"),
    *nothing("they are in the metrics always", "--get-mismatch-metrics", "--use-rollout-entropy"),
    *refused("the optimizer keeps its moments", "leave it out", "--reset-optimizer-states", "--use-stateless-adam"),
    *refused(
        "all parameters are trained", "leave it out", "--only-train-params-name-list", "--freeze-params-name-list", "--freeze-indexer"
    ),
    *refused("heads that predict further tokens are not trained", "leave it out", "--enable-mtp-training", "--mtp-loss-scaling-factor"),
    *refused(
        "the objective is that of loss.policy", "loss.policy, or a function of yours there", "--pg-loss-type", "--use-score-centering"
    ),
    *refused("roles have their settings in the one file", "loss.critic", "--megatron-config-path", "--critic-load", "--critic-save"),
    *refused("old policies are not kept as actors", "loss.proximal says what ratios are taken against", "--keep-old-actor"),
)
OPTIMIZER: tuple[Flag, ...] = (
    mapped("--optimizer", "text", "trainer.optimizer", default="adam", says="adam"),
    mapped("--lr", "number", "trainer.optimizer.learning_rate", default=1e-6),
    mapped("--min-lr", "number", "trainer.optimizer.final_fraction", default=0.0, says="as a part of --lr"),
    mapped("--lr-decay-style", "text", "trainer.optimizer.schedule", default="linear"),
    mapped(
        "--lr-warmup-iters",
        "whole",
        "trainer.optimizer.warmup_steps",
        default=0,
        says="in batches: divided by the steps of a rollout, rounded up",
    ),
    mapped("--lr-warmup-fraction", "number", "trainer.optimizer.warmup_steps", says="of the decay's length"),
    mapped("--lr-decay-iters", "whole", "trainer.optimizer.decay_steps", says="in batches, as --lr-warmup-iters"),
    mapped("--lr-wsd-decay-iters", "whole", "trainer.optimizer.cooldown_fraction", says="as a part of the decay's length"),
    mapped("--weight-decay", "number", "trainer.optimizer.weight_decay", default=0.01),
    mapped("--adam-beta1", "number", "trainer.optimizer.beta1", default=0.9),
    mapped("--adam-beta2", "number", "trainer.optimizer.beta2", default=0.999),
    mapped("--adam-eps", "number", "trainer.optimizer.eps", default=1e-8),
    mapped("--clip-grad", "number", "trainer.optimizer.clip_norm", default=1.0),
    *nothing("masters and moments are float32, on the trainer's GPU", "--use-precision-aware-optimizer", "--use-distributed-optimizer"),
    *(
        near(name, "switch", says="the optimizer's state stays on the GPU; trainer.shards cuts it")
        for name in ("--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--fsdp-cpu-offload", "--fsdp-state-dict-cpu-offload")
    ),
    *refused("the decay of weights is constant", "--weight-decay", "--start-weight-decay", "--end-weight-decay"),
    mapped("--weight-decay-incr-style", "text", default="constant", says="constant"),
    mapped("--lr-warmup-init", "number", default=0.0, says="0"),
    mapped("--lr-wsd-decay-style", "text", default="exponential", says="linear; WSD falls in no other way here"),
)
CHECKPOINTS: tuple[Flag, ...] = (
    near(
        "--save", "text", "run.dir", "run.name", says="checkpoints are in the run's directory, the newest trainer.keep_checkpoints of them"
    ),
    mapped("--save-interval", "whole", "trainer.checkpoint_every"),
    near("--save-hf", "text", "trainer.export_every", says="model directories are in hf/ of the run directory, at every --save-interval"),
    near(
        "--load",
        "text",
        says="`streamrl up` goes on with the run of that name; training begins with --hf-checkpoint. Of another directory of Megatron's, "
        "`streamrl convert` makes a model.path",
    ),
    near(
        "--ref-load",
        "text",
        says="the reference, and what training begins with, is --hf-checkpoint, of which this is the conversion; of other weights "
        "`streamrl convert` makes a loss.kl.reference",
    ),
    *nothing(
        "a checkpoint is written beside the training, whole", "--async-save", "--async-strategy", "--ckpt-format", "--dist-ckpt-strictness"
    ),
    *nothing("weights are read from --hf-checkpoint", "--finetune", "--no-load-optim", "--no-load-rng", "--ckpt-step", "--ref-ckpt-step"),
    near("--no-save-optim", "switch", says="checkpoints have the optimizer's state, without which no run goes on"),
    *refused(
        "it is of slime's tools that convert checkpoints", "`streamrl convert SOURCE DEST --model DIR`", "--input-dir", "--origin-hf-dir"
    ),
    *refused("a teacher is a model directory", "`streamrl convert` makes one of a step", "--opd-teacher-ckpt-step"),
    near("--no-save-rng", "switch", says="checkpoints are whole"),
)
LOGS: tuple[Flag, ...] = (
    mapped("--use-wandb", "switch", "metrics.sinks"),
    mapped("--wandb-project", "text", "metrics.wandb.project"),
    mapped("--wandb-team", "text", "metrics.wandb.entity"),
    mapped("--wandb-mode", "text", "metrics.wandb.mode", says="disabled leaves the sink out"),
    *nothing("the key is WANDB_API_KEY of the environment, and is never written", "--wandb-key"),
    *(
        near(name, "text", says="runs are named run.name, and kept in the run directory")
        for name in ("--wandb-group", "--wandb-run-id", "--wandb-dir", "--wandb-exp-name")
    ),
    *nothing("runs are named run.name", "--disable-wandb-random-suffix", "--wandb-always-use-train-step"),
    *refused("the service is that of the environment", "set WANDB_BASE_URL where `streamrl up` is started", "--wandb-host"),
    mapped("--use-tensorboard", "switch", "metrics.sinks"),
    near("--tb-project-name", "text", "metrics.tensorboard.dir", says="a folder of the run's name is made in it"),
    near("--tb-experiment-name", "text", says="the folder is called run.name"),
    *nothing(
        "metrics, page and `streamrl inspect` show it",
        "--log-multi-turn",
        "--log-passrate",
        "--log-reward-category",
        "--log-correct-samples",
    ),
    *nothing("metrics are kept of every batch", "--log-interval", "--log-progress", "--timing-log-level"),
)
DEBUG: tuple[Flag, ...] = (
    near("--debug-train-only", "switch", says="with --loss-type sft_loss no engine is started anyway; else it is refused"),
    *(
        near(name, "text", says="all samples are on the stream: `streamrl record`, `inspect`, `export`")
        for name in ("--save-debug-rollout-data", "--save-debug-train-data", "--dump-details")
    ),
    *refused(
        "samples of slime are not read",
        "`streamrl replay` trains on a run's own",
        "--load-debug-rollout-data",
        "--load-debug-rollout-data-subsample",
        "--load-forge-rollout-data",
    ),
    *refused("a run has a trainer", "`streamrl bench` measures engines alone", "--debug-rollout-only"),
    *refused(
        "a step's memory is recorded by its number",
        "debug.profile_versions",
        "--record-memory-history",
        "--memory-snapshot-dir",
        "--memory-recorder",
    ),
    *refused(
        "a step's memory is recorded by its number", "debug.profile_versions", "--memory-snapshot-num-steps", "--memory-snapshot-path"
    ),
    *refused("steps are profiled by their number", "debug.profile_versions", "--use-pytorch-profiler", "--profile", "--profile-step-start"),
    *nothing("engines check every version against its digest (engine.sglang.verify)", "--check-weight-update-equal"),
    *nothing("it is for slime's own tests", "--ci-test", "--ci-disable-kl-checker", "--ci-train-rollout-logprob-abs-diff-threshold"),
    *nothing("it is for slime's own tests", "--ci-save-grad-norm", "--ci-load-grad-norm"),
    mapped("--deterministic-mode", "switch", "run.numerics"),
    *refused("it went with slime's FSDP backend", "run.numerics = 'bitwise' and engine.deterministic = true", "--true-on-policy-mode"),
)
