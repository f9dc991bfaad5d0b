"""Files of a torch trainer's checkpoint: safetensors, JSON and the caller's bytes; nothing in it is unpickled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.tensors.names import named
from streamrl.trainers.checkpoints import check_files, damaged, recover, unreadable

FORMAT = 1


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """`meta.json`."""

    format: int
    backend: str
    version: str
    stage: str
    """Kind of the last batch; empty before the first."""
    digest: str
    critic: str = ""
    """Digest of the critic's parameters; empty where there is none."""
    reference: str = ""
    """Digest of the reference's parameters; empty where it is never renewed."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """A model under training, on the host."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    digest: str
    """Of the parameters."""


class TorchState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next step depends on, on the host."""

    policy: ModelState
    critic: ModelState | None
    random: dict[str, Tensor]
    stage: str
    version: str
    reference: ModelState | None = None
    """Without an optimizer; None where it is never renewed."""


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, of its own memory."""
    return tensor.detach().to("cpu", copy=True)


def write_checkpoint(directory: Path, state: TorchState, extra: bytes) -> None:
    """Write all files of a checkpoint into an existing directory."""
    save_file(state.policy.parameters, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(state.policy.optimizer, directory / "optimizer.safetensors")
    if state.critic is not None:
        save_file(state.critic.parameters, directory / "critic.safetensors")
        save_file(state.critic.optimizer, directory / "critic_optimizer.safetensors")
    if state.reference is not None:
        save_file(state.reference.parameters, directory / "reference.safetensors", metadata={"format": "pt"})
    save_file(state.random, directory / "random.safetensors")
    (directory / "extra.bin").write_bytes(extra)
    critic = state.critic.digest if state.critic is not None else ""
    reference = state.reference.digest if state.reference is not None else ""
    meta = Meta(
        format=FORMAT,
        backend="torch",
        version=state.version,
        stage=state.stage,
        digest=state.policy.digest,
        critic=critic,
        reference=reference,
    )
    (directory / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))


def read_checkpoint(path: Path) -> tuple[TorchState, bytes]:
    """State and the caller's bytes; raises CheckpointDamaged, and TrainingError for a checkpoint of another format."""
    recover(path)
    check_files(path)
    try:
        meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
        if (meta.format, meta.backend) != (FORMAT, "torch"):
            raise TrainingError(f"expected a torch checkpoint of format {FORMAT} in {path}, got {meta.backend} of format {meta.format}")
        state = TorchState(
            policy=_read(path / "model.safetensors", path / "optimizer.safetensors", meta.digest),
            critic=_read(path / "critic.safetensors", path / "critic_optimizer.safetensors", meta.critic) if meta.critic else None,
            random=load_file(path / "random.safetensors"),
            stage=meta.stage,
            version=meta.version,
            reference=_read(path / "reference.safetensors", None, meta.reference) if meta.reference else None,
        )
        return state, (path / "extra.bin").read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, msgspec.DecodeError) as error:
        raise damaged(path, str(error)) from error


def _read(parameters: Path, optimizer: Path | None, digest: str) -> ModelState:
    return ModelState(parameters=load_file(parameters), optimizer=load_file(optimizer) if optimizer else {}, digest=digest)


def check_state(state: ModelState, parameters: Mapping[str, Tensor], where: Path, what: str, model_type: str) -> None:
    """Raise TrainingError unless the state has these parameters' names and shapes, CheckpointDamaged unless the digest that it says."""
    expected = {name: tuple(p.shape) for name, p in parameters.items()}
    got = {name: tuple(value.shape) for name, value in state.parameters.items()}
    if expected != got:
        odd = sorted(set(expected.items()) ^ set(got.items()))[0]
        raise TrainingError(
            f"the checkpoint {where} has {what} of another model: {odd[0]} {odd[1]} is only in one of them",
            hint="was the path of its model changed?",
            path=str(where),
            what=what,
            parameter=odd[0],
        )
    if (digest := digest_of(state.parameters.items(), model_type)) != state.digest:
        problem = f"expected {what} with digest {state.digest}, got {digest}"
        raise damaged(where, problem, what=what, expected=state.digest, got=digest)


def host_bytes(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """[nbytes] uint8 of a tensor's elements in C order; shares memory with it where it lies on the host."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_of(parameters: Iterable[tuple[str, Tensor]], model_type: str) -> str:
    """Digest of a model's parameters, 16 hex digits: by the names of checkpoints."""
    sums: dict[str, int] = {}
    for name, parameter in parameters:
        data, item = host_bytes(parameter), parameter.element_size()
        for one in named(model_type, name, parameter.shape):
            sums[one.name] = tensor_digest(data[one.first * item : (one.first + one.numel) * item], item)
    return combine(sums)
