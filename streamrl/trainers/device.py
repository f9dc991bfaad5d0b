"""Where and in which type a torch trainer computes."""

from __future__ import annotations

import os

import torch

from streamrl.config.ray import OWN_GPUS_VARIABLE
from streamrl.config.tree import Config, TrainerConfig
from streamrl.errors import ConfigError


def training_device(trainer: TrainerConfig, rank: int = 0) -> torch.device:
    """The device of one rank: GPU `trainer.gpu + rank`, or `trainer.gpu` where each rank sees GPUs of its own only.

    Raises:
        ConfigError: a GPU was asked for that is not there.
    """
    if trainer.device == "cpu" or (trainer.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    own = bool(os.environ.get(OWN_GPUS_VARIABLE))
    index, count = trainer.gpu + (0 if own else rank), torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"expected GPU {index} for rank {rank} of the trainer, this process sees {count}",
            hint="set trainer.gpu, CUDA_VISIBLE_DEVICES, or trainer.device = 'cpu'",
            key="trainer.gpu",
            gpu=index,
            gpus=count,
        )
    return torch.device("cuda", index)


def training_dtype(config: Config) -> torch.dtype:
    """Type of the parameters: `trainer.dtype`, or the model's."""
    return torch.bfloat16 if (config.trainer.dtype or config.model.dtype) == "bfloat16" else torch.float32
