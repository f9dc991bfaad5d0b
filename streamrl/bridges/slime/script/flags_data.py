"""Flags of cluster, data, batches, rollouts, rewards and evaluations."""

from __future__ import annotations

from streamrl.bridges.slime.script.flag import Flag, mapped, near, nothing, refused

_SHARED = "trainer and engine keep their memory while they share GPUs; nothing is moved out"

CLUSTER: tuple[Flag, ...] = (
    mapped("--actor-num-nodes", "whole", "trainer.ranks", "ray.address", default=1, says="several nodes: Ray places the workers"),
    mapped("--actor-num-gpus-per-node", "whole", "trainer.ranks", default=8),
    mapped("--rollout-num-gpus", "whole", "engine.workers", "engine.sglang.gpus"),
    mapped("--rollout-num-gpus-per-engine", "whole", "engine.sglang.tensor_parallel", default=1),
    mapped("--num-gpus-per-node", "whole", "engine.sglang.gpus", default=8),
    near(
        "--colocate",
        "switch",
        "engine.sglang.gpus",
        "weights.transport",
        "engine.sglang.flags",
        says=f"engines get the trainer's GPUs. {_SHARED}, so the engine's part is smaller (docs/gpu.md, Memory)",
    ),
    *(
        near(name, "switch", says=_SHARED)
        for name in ("--offload", "--offload-train", "--no-offload-train", "--offload-rollout", "--no-offload-rollout", "--release-train")
    ),
    mapped("--train-backend", "text", "trainer.backend", default="megatron", says="fsdp is the backend torch, cut by trainer.shards"),
    mapped("--distributed-timeout-minutes", "whole", "trainer.rank_timeout_s"),
    *nothing("ranks meet over the bus and sum over NCCL, or gloo without GPUs", "--distributed-backend"),
    *nothing("the critic has the policy's GPUs", "--critic-num-nodes", "--critic-num-gpus-per-node"),
    *refused("variables of the trainer's environment are not part of a run", "set them where `streamrl up` is started", "--train-env-vars"),
    *refused("prompts and answers are computed by one server", "leave it out", "--prefill-num-servers", "--sglang-config"),
    *refused("engines are started with the run", "attach others with `streamrl attach`", "--rollout-external-engine-addrs"),
)
DATA: tuple[Flag, ...] = (
    mapped("--prompt-data", "text", "data.train"),
    mapped("--input-key", "text", "data.prompt_key", default="input"),
    mapped("--label-key", "text", "data.label_key"),
    mapped("--metadata-key", "text", "data.metadata_key", default="metadata"),
    mapped("--tool-key", "text", "data.tools_key", default="tools"),
    mapped("--apply-chat-template", "switch", "data.chat_template"),
    mapped("--apply-chat-template-kwargs", "text", "data.chat_template_kwargs"),
    mapped("--rollout-shuffle", "switch", "data.shuffle"),
    mapped("--rollout-seed", "whole", "run.seed", default=42),
    mapped("--rollout-max-prompt-len", "whole", "data.max_prompt_tokens", "data.reading"),
    mapped("--num-rollout", "whole", "run.steps"),
    mapped("--num-epoch", "whole", "run.steps", says="epochs x rows // prompts of a rollout; the rows are counted by --rows"),
    *nothing("run.seed is that of --rollout-seed; no weights are drawn", "--seed"),
    *nothing("what is trained of a conversation is read from the chat template", "--loss-mask-type"),
    *refused("prompts are text", "leave it out; images are not trained here", "--multimodal-keys"),
    *refused("rows come from files", "data.train, [[data.sources]], or a function in data.curriculum", "--data-source-path"),
    *refused("rows come from files", "data.train", "--disable-rollout-global-dataset"),
    *refused("there is no service that collects rollouts: they go over the bus", "producer.function", "--rollout-buffer-url"),
    *refused("there is no service that collects rollouts: they go over the bus", "producer.function", "--rollout-task-type"),
    *refused("there is no service that collects rollouts: they go over the bus", "tasks.stale", "--min-batch-collection-ratio"),
    *refused("there is no service that collects rollouts: they go over the bus", "bus.patience_s", "--fetch-trajectory-retry-times"),
    *refused("`streamrl up` goes on where the ledger ends", "leave it out; `streamrl replay RUN --from N` branches", "--start-rollout-id"),
)
BATCHES: tuple[Flag, ...] = (
    mapped("--rollout-batch-size", "whole", "tasks.batch_tasks", says="prompts of a rollout are tasks of a batch"),
    mapped("--n-samples-per-prompt", "whole", "tasks.num_rollouts", default=1),
    mapped("--global-batch-size", "whole", "trainer.minibatches", says="steps = prompts x samples / global batch"),
    mapped("--num-steps-per-rollout", "whole", "trainer.minibatches"),
    mapped(
        "--max-tokens-per-gpu",
        "whole",
        "trainer.micro_tokens",
        says="times --context-parallel-size: a row is that of all ranks that share it",
    ),
    mapped("--micro-batch-size", "whole", "trainer.micro_tokens", default=1, says="with --use-dynamic-batch-size it counts for nothing"),
    *nothing("samples are always packed by their tokens", "--use-dynamic-batch-size", "--log-probs-max-tokens-per-gpu"),
    *nothing("ranks always get equal work", "--balance-data", "--balance-by-flops", "--data-pad-size-multiplier"),
    near(
        "--over-sampling-batch-size", "whole", "producer.concurrency", says="so many tasks are in flight; none is sampled to be thrown away"
    ),
    near(
        "--partial-rollout",
        "switch",
        "tasks.max_staleness",
        says="rollouts go on across versions anyway; tokens are at most one version old",
    ),
    near(
        "--mask-offpolicy-in-partial-rollout",
        "switch",
        "loss.correction.mask_staleness",
        says="tokens older than one version are masked, those of one version are trained",
    ),
    near(
        "--update-weights-interval",
        "whole",
        "tasks.max_staleness",
        says="every version is published; tokens may be so many versions old",
        default=1,
    ),
)
ROLLOUT: tuple[Flag, ...] = (
    mapped("--hf-checkpoint", "text", "model.path"),
    mapped(
        "--rollout-function-path",
        "text",
        "run.kind",
        "tasks.max_staleness",
        "slime.rollout_function_path",
        default="slime.rollout.sglang_rollout.generate_rollout",
        says="those of slime itself: synchronous, streaming, fully asynchronous, fine-tuning; your own is a hook",
    ),
    mapped("--rollout-temperature", "number", "sampling.temperature", default=1.0),
    mapped("--rollout-top-p", "number", "sampling.top_p", "trainer.support_replay", default=1.0),
    mapped("--rollout-top-k", "whole", "sampling.top_k", default=-1),
    mapped("--rollout-stop", "texts", "sampling.stop"),
    mapped("--rollout-stop-token-ids", "wholes", "sampling.stop_token_ids"),
    mapped("--rollout-max-response-len", "whole", "sampling.max_new_tokens"),
    mapped("--rollout-max-context-len", "whole", "model.max_len"),
    mapped("--sglang-server-concurrency", "whole", "engine.slots"),
    near("--rollout-skip-special-tokens", "switch", says="rewards see the text with special tokens"),
    near(
        "--update-weight-transport",
        "text",
        "weights.transport",
        says="disk becomes bus: versions go over the bus, whole or as what changed",
        default="nccl",
    ),
    *nothing(
        "over the bus versions are what changed, checked by digests, without a shared folder",
        *("--update-weight-mode", "--update-weight-disk-dir", "--update-weight-disk-keep-files", "--update-weight-delta-encoding"),
        *("--update-weight-delta-checksum", "--update-weight-local-checkpoint-dir"),
    ),
    *nothing("weights move in parts of their own size, and no request is aborted for them", "--update-weight-buffer-size"),
    *nothing("engines are watched and restarted always (supervise)", "--use-fault-tolerance", "--rollout-health-check-interval"),
    *nothing("engines are watched and restarted always (supervise)", "--rollout-health-check-timeout", "--rollout-health-check-first-wait"),
    *nothing("producers ask the engines themselves", "--use-slime-router", "--http-proxy", "--use-distributed-post"),
    *nothing("samples go over the bus", "--rollout-data-transport"),
    *nothing("names are read from config.json", "--model-name"),
    *refused("samples go on under new weights, and are never queued whole", "tasks.max_staleness", "--buffer-sort-by-staleness"),
)
REWARD: tuple[Flag, ...] = (
    mapped(
        "--rm-type",
        "text",
        "reward.kind",
        says="math, dapo, deepscaler, f1, gpqa, ifbench, random, remote_rm, all but ifbench and random also with boxed_",
    ),
    mapped("--rm-url", "text", "reward.options"),
    mapped("--reward-key", "text", "reward.key"),
    mapped("--eval-reward-key", "text", "evaluation.sets[].reward.key"),
)
EVALUATION: tuple[Flag, ...] = (
    mapped("--eval-interval", "whole", "evaluation.every", says="a rollout is a version"),
    mapped(
        "--eval-prompt-data", "texts", "evaluation.sets[].path", "evaluation.sets[].name", says="pairs of name and path; may be repeated"
    ),
    mapped("--n-samples-per-eval-prompt", "whole", "evaluation.sets[].n", default=1),
    mapped("--eval-temperature", "number", "evaluation.sampling.temperature", says="slime's default is that of the rollouts"),
    mapped("--eval-top-p", "number", "evaluation.sampling.top_p"),
    mapped("--eval-top-k", "whole", "evaluation.sampling.top_k"),
    mapped("--eval-max-response-len", "whole", "evaluation.sampling.max_new_tokens"),
    mapped("--eval-max-context-len", "whole", "model.max_len", says="the longer of the two is taken"),
    mapped("--eval-max-prompt-len", "whole", "evaluation.sets[].max_prompt_tokens"),
    mapped("--eval-input-key", "text", "evaluation.sets[].prompt_key"),
    mapped("--eval-label-key", "text", "evaluation.sets[].label_key"),
    mapped("--eval-tool-key", "text", "evaluation.sets[].tools_key"),
    near("--skip-eval-before-train", "switch", says="the untrained policy is evaluated, beside the first rollouts"),
    *refused("it holds sets of problems in YAML", "write them as [[evaluation.sets]] (docs/evaluation.md)", "--eval-config"),
    *refused("an answer ends where the model ends it", "leave it out", "--eval-min-new-tokens"),
)
