"""Checks all rules of a configuration, in their order; those about several sections are here. Bounds of single values are at the fields."""

from __future__ import annotations

import msgspec

from streamrl.config.bounds import refuse
from streamrl.config.bridges import bridge_of, function_of
from streamrl.config.bus import check_bus
from streamrl.config.check_data import check_data, pairs
from streamrl.config.check_evaluation import check_evaluation
from streamrl.config.check_loss import check_loss
from streamrl.config.check_megatron import check_megatron
from streamrl.config.check_recording import check_recording
from streamrl.config.check_sampling import check_sampling
from streamrl.config.data import data_sets
from streamrl.config.engines import check_engine
from streamrl.config.filters import FiltersConfig, check_filters
from streamrl.config.gateway import check_gateway
from streamrl.config.loss import OF_LOGITS, LossConfig
from streamrl.config.metrics import check_slo
from streamrl.config.ray import check_ray
from streamrl.config.reward import LengthConfig, check_penalties, check_reward
from streamrl.config.tree import Config
from streamrl.config.weights import check_weights

MIN_VOCAB_SIZE = 264
"""The special tokens and the 256 bytes, rounded up to a multiple of 8."""
_MOST_COUNT = (1 << 31) - 1
_MOST_BYTES = 1 << 53
_MOST_SEED = (1 << 63) - 1


def check(config: Config) -> None:
    """Raise ConfigError for the first rule across sections that does not hold. Looks at no file."""
    _check_counts(config)
    _check_work(config)
    check_weights(config.weights)
    check_data(config)
    _check_sft(config)
    check_reward(config.reward, config.data, config.loss.advantage)
    check_sampling(config)
    check_recording(config)
    check_penalties(config.reward, config.loss, config.sampling.max_new_tokens)
    check_filters(config.filters, config.model.max_len, late=config.reward.kind == "late" or config.reward.workers > 0)
    check_evaluation(config)
    _check_schedule(config)
    _check_debug(config)
    _check_model(config)
    check_loss(config)
    check_megatron(config)
    _check_routing(config)
    check_engine(config.engine, config.evaluation.engines, placed=bool(config.ray.address))
    check_ray(config.ray)
    if config.ray.address:
        _check_placed(config)
    if (bridge := bridge_of(config.producer.function)) and bridge.check_config:
        function_of(bridge.check_config)(config)
    check_bus(config.bus)
    check_slo(config.slo)
    check_gateway(config.gateway, config.tasks.num_rollouts, config.group_size)


def _check_counts(section: msgspec.Struct, prefix: str = "") -> None:
    """No whole number is so large that a product of two, or its place on the wire, has no room for it."""
    for name, encoded in zip(section.__struct_fields__, section.__struct_encode_fields__, strict=True):
        key, value = prefix + encoded, getattr(section, name)
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(one, msgspec.Struct):
                _check_counts(one, f"{key}.")
            elif isinstance(one, int):
                most = _MOST_SEED if name == "seed" else _MOST_BYTES if name.endswith("_bytes") else _MOST_COUNT
                refuse(abs(one) > most, f"{key} must be at most {most}, got {one}", hint="no limit is needed beyond that", key=key)


def _check_work(config: Config) -> None:
    tasks, data = config.tasks, config.data
    refuse(
        not data.train and not data.sources,
        "data.train must name the training rows, got nothing",
        hint="set it to a JSONL or Parquet file",
        key="data.train",
    )
    refuse(
        tasks.hold_ahead and tasks.max_staleness == 0,
        "tasks.hold_ahead needs tasks.max_staleness >= 1, got 0: in lockstep nothing is issued ahead, so there is nothing to hold",
        hint="leave hold_ahead off, or allow a staleness of 1",
        key="tasks.hold_ahead",
    )
    _check_expiry(config)
    _check_ranks(config)
    refuse(
        tasks.drop_zero_variance and config.group_size == 1,
        "tasks.drop_zero_variance needs tasks.num_rollouts >= 2, got 1: a group of one has no spread, so every group would be dropped",
        hint="use several rollouts a task, or set tasks.drop_zero_variance = false",
        key="tasks.num_rollouts",
    )
    refuse(
        config.warmup.max_steps > 0 and not data.label_key,
        "warmup.max_steps needs data.label_key, got none: the warm-up trains on the rows' labels",
        hint="name the label's field in data.label_key, or set warmup.max_steps = 0",
        key="data.label_key",
    )
    refuse(
        config.reward.kind == "late" and config.reward.workers > 0,
        f"reward.workers must be 0 with reward.kind = late, got {config.reward.workers}: somebody else gives the rewards, and rewarders "
        "have nothing to score with",
        hint="name the reward in reward.kind, or set reward.workers = 0",
        key="reward.workers",
    )
    refuse(
        config.trainer.minibatches > tasks.batch_tasks,
        f"trainer.minibatches must be at most tasks.batch_tasks = {tasks.batch_tasks}, got {config.trainer.minibatches}: groups stay whole",
        hint="use fewer minibatches or larger batches",
        key="trainer.minibatches",
    )


def _check_ranks(config: Config) -> None:
    refuse(
        config.trainer.ranks > 1 and config.trainer.tabular,
        f"trainer.ranks must be 1 with trainer.backend = table, got {config.trainer.ranks}: a tabular policy is trained by one process",
        hint="set trainer.ranks = 1, or train with the torch backend",
        key="trainer.ranks",
    )
    ranks, shards = config.trainer.ranks, config.trainer.shards
    refuse(
        ranks % shards != 0,
        f"trainer.shards must divide trainer.ranks, got ranks = {ranks} and shards = {shards}: {ranks} = {ranks // shards} x {shards} + "
        f"{ranks % shards}",
        hint=f"set trainer.ranks to a multiple of {shards}, such as {shards * max(1, round(ranks / shards))}, or trainer.shards to a "
        f"divisor of {ranks}",
        key="trainer.shards",
    )
    context, attention = config.trainer.context, config.trainer.attention
    refuse(
        ranks % context != 0,
        f"trainer.context must divide trainer.ranks, got ranks = {ranks} and context = {context}: {ranks} = {ranks // context} x "
        f"{context} + {ranks % context}",
        hint=f"set trainer.ranks to a multiple of {context}, such as {context * max(1, round(ranks / context))}, or trainer.context to a "
        f"divisor of {ranks}",
        key="trainer.context",
    )
    refuse(
        context > 1 and attention not in ("auto", "packed"),
        f"trainer.context = {context} needs packed rows, which ranks share, got trainer.attention = {attention!r}",
        hint="set trainer.attention = 'packed' or 'auto'",
        key="trainer.attention",
    )
    refuse(
        context > 1 and bool(config.loss.of_logits),
        f"trainer.context = {context}, but {OF_LOGITS} wants the logits of whole samples, of which a rank has 1 / {context}",
        hint="set trainer.context = 1, or name a function in loss.policy, which gets log-probs of whole samples",
        key="trainer.context",
    )


def _check_schedule(config: Config) -> None:
    optimizer = config.trainer.optimizer
    refuse(
        0 < optimizer.decay_steps <= optimizer.warmup_steps,
        f"trainer.optimizer.decay_steps must be above warmup_steps = {optimizer.warmup_steps}, got {optimizer.decay_steps}: "
        "the rise is a part of it",
        hint="raise it, or set it to 0 for run.steps",
        key="trainer.optimizer.decay_steps",
    )
    refuse(
        optimizer.schedule == "inverse_sqrt" and optimizer.warmup_steps == 0,
        "trainer.optimizer.schedule = inverse_sqrt needs warmup_steps >= 1, got 0: the rate falls as sqrt(warmup_steps / step)",
        hint="set trainer.optimizer.warmup_steps: the more, the slower the rate falls",
        key="trainer.optimizer.warmup_steps",
    )
    refuse(
        optimizer.ess_scaling == "off" and optimizer.ess_reference != 1,
        f"trainer.optimizer.ess_reference = {optimizer.ess_reference} is for ess_scaling = sqrt or linear, got off",
        hint="set trainer.optimizer.ess_scaling, or leave ess_reference out",
        key="trainer.optimizer.ess_reference",
    )


def _check_expiry(config: Config) -> None:
    """Versions end a task only where they go on rising past it."""
    tasks, key = config.tasks, "tasks.expire_versions"
    if not tasks.expire_versions:
        return
    hint = "set it to 0: there producer.idle_timeout_s and producer.rollout_timeout_s end what hangs"
    left = tasks.max_staleness - config.debug.delay_versions
    refuse(
        tasks.stale == "wait",
        f"{key} must be 0 with tasks.stale = wait, got {tasks.expire_versions}: the version does not rise while an old task is unfinished, "
        "so that none would ever expire",
        hint=hint,
        key=key,
    )
    refuse(
        left == 0,
        f"{key} must be 0 in lockstep, got {tasks.expire_versions}: a batch needs every task that is out, so that no version passes one",
        hint=hint,
        key=key,
    )
    refuse(
        tasks.expire_versions <= left,
        f"{key} must be above tasks.max_staleness - debug.delay_versions = {left}, got {tasks.expire_versions}: "
        "rollouts that are in time would be cut short",
        hint=f"set it to {left + 1} or more, or to 0",
        key=key,
    )


def _check_debug(config: Config) -> None:
    delay, bound, keep = config.debug.delay_versions, config.tasks.max_staleness, config.weights.keep
    refuse(
        delay > bound,
        f"debug.delay_versions needs tasks.max_staleness >= {delay}, got {bound}: every token would be too old when it is trained on",
        hint="raise tasks.max_staleness: what it exceeds the delay by is left for rollouts in flight",
        key="debug.delay_versions",
    )
    refuse(
        delay > 0 and 0 < keep < delay + 3,
        f"debug.delay_versions = {delay} needs weights.keep >= {delay + 3}, got {keep}: the bytes of the version to serve would be gone",
        hint="raise weights.keep, or keep all with weights.keep = 0",
        key="weights.keep",
    )
    refuse(
        delay > 0 and config.weights.transport == "ipc" and config.weights.snapshots < delay + 3,
        f"debug.delay_versions = {delay} with weights.transport = ipc needs weights.ring >= {delay + 3}, got {config.weights.snapshots}",
        hint="raise weights.ring: device memory holds that many versions and no more",
        key="weights.ring",
    )
    refuse(
        config.debug.memory_tokens > 0 and config.trainer.tabular,
        "debug.memory_tokens is for trainer.backend = torch, got table",
        hint="leave it out",
        key="debug.memory_tokens",
    )
    refuse(
        max(config.debug.memory_ranks, default=0) >= config.trainer.ranks,
        f"debug.memory_ranks: expected ranks below trainer.ranks = {config.trainer.ranks}, got {list(config.debug.memory_ranks)}",
        hint="the first rank is 0",
        key="debug.memory_ranks",
    )
    refuse(
        bool(config.debug.profile_versions) and config.trainer.tabular,
        "debug.profile_versions is for trainer.backend = torch, got table",
        hint="leave it out",
        key="debug.profile_versions",
    )
    refuse(
        config.debug.token_delay_s > 0 and not config.engine.traits.tabular,
        f"debug.token_delay_s is for engine.kind = table, got {config.engine.kind}",
        hint="use the table backends, or leave the delay out",
        key="debug.token_delay_s",
    )


def _check_model(config: Config) -> None:
    model, longest = config.model, config.data.max_prompt_tokens + config.sampling.max_new_tokens
    refuse(
        config.engine.traits.tabular != config.trainer.tabular,
        f"engine.kind and trainer.backend must both be table or neither, got {config.engine.kind} and {config.trainer.backend}",
        hint="a tabular policy is trained and served by the table backends only",
        key="engine.kind",
    )
    refuse(
        model.vocab_size != 0 and (model.vocab_size < MIN_VOCAB_SIZE or config.engine.traits.tabular),
        f"model.vocab_size must be 0 or at least {MIN_VOCAB_SIZE}, and 0 for engine.kind = table, got {model.vocab_size}",
        hint="byte-pair encoding begins with the 256 bytes and a few special tokens; 0 gives one token a character",
        key="model.vocab_size",
    )
    refuse(
        model.heads % model.kv_heads != 0,
        f"model.heads must be a multiple of model.kv_heads, got {model.heads} and {model.kv_heads}",
        hint="each key-value head serves the same number of query heads",
        key="model.heads",
    )
    refuse(
        longest > model.max_len and (config.run.kind == "rl" or bool(config.data.heldout)),
        f"model.max_len must hold data.max_prompt_tokens + sampling.max_new_tokens = {longest}, got {model.max_len}",
        hint="raise model.max_len, or lower one of the two",
        key="model.max_len",
    )


def _check_routing(config: Config) -> None:
    refuse(
        config.trainer.routing_replay and config.engine.traits.tabular,
        f"trainer.routing_replay is for mixtures of experts, got engine.kind = {config.engine.kind}, whose policies are tables",
        hint="leave it out",
        key="trainer.routing_replay",
    )


def _check_placed(config: Config) -> None:
    """Ray hands out the GPUs."""
    ray = config.ray
    may_share = 0 < ray.trainer.gpus <= 0.5 and ray.trainer.strategy != "STRICT_SPREAD"
    refuse(
        config.trainer.ranks > 1 and config.trainer.device != "cpu" and may_share,
        f"ray.trainer.gpus must be above 0.5 with trainer.ranks = {config.trainer.ranks}, got {ray.trainer.gpus:g}: two ranks may get one "
        "GPU, where NCCL sums no gradients",
        hint="set it to 0.6, say; or ray.trainer.strategy = 'STRICT_SPREAD' for a node each",
        key="ray.trainer.gpus",
    )
    sglang = config.engine.sglang
    refuse(
        bool(sglang.gpus),
        f"engine.sglang.gpus must be empty with ray.address, got {list(sglang.gpus)}: Ray gives each engine its GPUs",
        hint="leave it out; ray.engine.gpus says how many",
        key="engine.sglang.gpus",
    )
    refuse(
        config.trainer.gpu != 0,
        f"trainer.gpu must be 0 with ray.address, got {config.trainer.gpu}: Ray gives each rank its GPU",
        hint="leave it out; ray.trainer.gpus says how many",
        key="trainer.gpu",
    )
    wanted = sglang.tensor_parallel
    refuse(
        config.engine.traits.gpus == "own" and ray.engine.gpus > 0 and ray.engine.gpus != wanted and (wanted > 1 or ray.engine.gpus > 1),
        f"ray.engine.gpus must be engine.sglang.tensor_parallel = {wanted}, or below 1 for tensor_parallel = 1, got {ray.engine.gpus:g}",
        hint="leave it out",
        key="ray.engine.gpus",
    )


def _check_sft(config: Config) -> None:
    """Raise ConfigError for keys that are for reinforcement learning alone."""
    if config.run.kind != "sft":
        return
    data, loss = config.data, config.loss
    own = LossConfig(
        reduction=loss.reduction, constant_length=loss.constant_length, legacy_samples=loss.legacy_samples, experts=loss.experts
    )
    # A recorded configuration may have another min_reward_std: a decision that is off.
    unfiltered = FiltersConfig(min_reward_std=config.filters.min_reward_std)
    for name, one in data_sets(data):
        refuse(
            not one.messages_key and not one.label_key,
            f"run.kind = sft needs data.messages_key or data.label_key, got neither{name and f' for {name}'}: there is nothing to train on",
            hint="name the field with the conversations in data.messages_key, or that with the answers in data.label_key",
            key="data.messages_key",
        )
    unused = (
        ("data.curriculum", bool(data.curriculum), "it weighs sources by their rewards"),
        (
            "data.sources",
            any(len(pairs(one)) > 1 for one in data.sources),
            "a source has one weight for the whole run: its `weight` is a number",
        ),
        ("reward.workers", config.reward.workers > 0, "there is nothing to score"),
        ("reward.overlong_buffer", config.reward.overlong_buffer > 0, "its batches have no rewards"),
        ("reward.length", config.reward.length != LengthConfig(), "its batches have no rewards"),
        ("filters", config.filters != unfiltered, "they are for rollouts, and never refuse demonstrations"),
        ("warmup.max_steps", config.warmup.max_steps > 0, "the whole run is what a warm-up is"),
        ("run.until_reward", bool(config.run.until_reward), "its batches have no rewards"),
        (
            "loss",
            loss != own,
            "its loss is the negative log-likelihood of the answers, of which loss.reduction and loss.experts can be chosen",
        ),
        ("gateway.workers", config.gateway.workers > 0, "there are no rollouts for agents"),
        ("trainer.optimizer.ess_scaling", config.trainer.optimizer.ess_scaling != "off", "no sampler has drawn its tokens"),
        ("tasks.expire_versions", config.tasks.expire_versions > 0, "demonstrations have no age"),
        ("producer.function", config.producer.function != "single_turn", "nobody makes rollouts"),
        ("trainer.routing_replay", config.trainer.routing_replay, "no engine has routed these tokens"),
        ("trainer.support_replay", config.trainer.support_replay, "no engine has drawn these tokens"),
    )
    for key, is_set, why in unused:
        refuse(is_set, f"{key} is not for run.kind = sft: {why}", hint="leave it out", key=key)
