"""From the configuration to a trainer; torch is imported for the torch backend only."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from streamrl.config.tree import Config, schedule_steps
from streamrl.core.batches import TrainBatch
from streamrl.tensors.mesh import mesh_of
from streamrl.trainers.protocol import Trainer
from streamrl.trainers.schedule import learning_rate


def make_trainer(config: Config, model_dir: Path, *, profile_dir: Path | None = None) -> Trainer:
    """Build the trainer; for torch, set this process's thread count and switch transformers' progress bars off.

    With `trainer.ranks` above 1 the caller has initialised torch.distributed's default group.

    Args:
        config: the whole tree, of which each part gets its own section.
        model_dir: initial policy: a Hugging Face directory, or one with a `table.json`.
        profile_dir: where `debug.profile_versions` are written; None: they are not.

    Raises:
        ConfigError: no such model.
        TrainingError: no process group of the size of `trainer.ranks`.
    """
    rate = learning_rates(config)
    if config.trainer.tabular:
        from streamrl.trainers.table.trainer import TableTrainer

        return TableTrainer(model_dir, trainer=config.trainer, loss=config.loss, learning_rate=rate)

    import torch
    from transformers.utils.logging import disable_progress_bar

    from streamrl.trainers.device import training_device, training_dtype
    from streamrl.trainers.torch.kernels import choose_kernels
    from streamrl.trainers.torch.profiling import StepProfiler
    from streamrl.trainers.torch.trainer import TorchTrainer

    disable_progress_bar()  # a worker's log is no terminal
    torch.set_num_threads(config.trainer.threads)
    bitwise = config.run.numerics == "bitwise"
    rank = torch.distributed.get_rank() if config.trainer.ranks > 1 and torch.distributed.is_initialized() else 0
    device = training_device(config.trainer, rank)
    dtype = training_dtype(config)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if bitwise and device.type == "cuda":
        # cuBLAS reads it when its first handle is made; without it torch refuses to be deterministic.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("FLASH_ATTENTION_DETERMINISTIC", "1")
    profiler = None
    if profile_dir is not None and config.debug.profile_versions:
        profiler = StepProfiler(profile_dir, config.debug.profile_versions, device, rank=rank)
    policy, parallel, load_frozen_model, load_values = None, None, None, None
    kernels = choose_kernels(config, device, dtype)
    if config.trainer.backend == "megatron":
        from streamrl.trainers.megatron.critic import MegatronValues
        from streamrl.trainers.megatron.model import MegatronLM
        from streamrl.trainers.megatron.ranks import MegatronParallel

        timeout_s = config.trainer.rank_timeout_s
        parallel = MegatronParallel(mesh_of(config.trainer), device, config.trainer.tensor, timeout_s)
        made = partial(MegatronLM, dtype=dtype, device=device, kernels=kernels, parallel=parallel)
        policy, load_frozen_model = made(model_dir, timeout_s=timeout_s), partial(made, frozen=True)
        load_values = partial(MegatronValues, dtype=dtype, device=device, kernels=kernels, parallel=parallel)
    return TorchTrainer(
        model_dir,
        policy=policy,
        load_frozen_model=load_frozen_model,
        load_values=load_values,
        parallel=parallel,
        trainer=config.trainer,
        loss=config.loss,
        learning_rate=rate,
        kernels=kernels,
        dtype=dtype,
        device=device,
        snapshots=config.weights.buffers,
        memory_tokens=config.debug.memory_tokens if rank in (config.debug.memory_ranks or (rank,)) else 0,
        profiler=profiler,
        recheck_versions=config.tasks.max_staleness + 1,
        # On CPU it costs nothing, so it is always on there.
        deterministic=bitwise or device.type == "cpu",
    )


def learning_rates(config: Config) -> Callable[[TrainBatch], float]:
    """The rate of a batch: constant in the warm-up, `trainer.optimizer`'s schedule afterwards, and in runs of kind `sft`."""
    optimizer, total_steps = config.trainer.optimizer, schedule_steps(config)

    def rate(batch: TrainBatch) -> float:
        if batch.kind == "sft" and config.run.kind == "rl":
            return config.warmup.learning_rate
        return learning_rate(
            batch.stage_step,
            peak=optimizer.learning_rate,
            warmup_steps=optimizer.warmup_steps,
            total_steps=total_steps,
            final_fraction=optimizer.final_fraction,
            kind=optimizer.schedule,
            cooldown_fraction=optimizer.cooldown_fraction,
        )

    return rate
