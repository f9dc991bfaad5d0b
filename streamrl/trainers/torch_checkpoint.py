"""Files of a torch trainer's checkpoint: safetensors, JSON and the caller's bytes; nothing in it is unpickled."""

from __future__ import annotations

from pathlib import Path

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.trainers.checkpoints import recover

FORMAT = 1


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """`meta.json`."""

    format: int
    backend: str
    version: str
    stage: str
    """Kind of the last batch; empty before the first."""
    digest: str


class TorchState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next step depends on, on the host."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: dict[str, Tensor]
    stage: str
    version: str
    digest: str


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, of its own memory."""
    return tensor.detach().to("cpu", copy=True)


def write_checkpoint(directory: Path, state: TorchState, extra: bytes) -> None:
    """Write all files of a checkpoint into an existing directory."""
    save_file(state.parameters, directory / "model.safetensors", metadata={"format": "pt"})
    save_file(state.optimizer, directory / "optimizer.safetensors")
    save_file(state.random, directory / "random.safetensors")
    (directory / "extra.bin").write_bytes(extra)
    meta = Meta(format=FORMAT, backend="torch", version=state.version, stage=state.stage, digest=state.digest)
    (directory / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))


def read_checkpoint(path: Path) -> tuple[TorchState, bytes]:
    """State and the caller's bytes; raises TrainingError when `path` is no complete checkpoint of this format."""
    recover(path)
    try:
        meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
        if (meta.format, meta.backend) != (FORMAT, "torch"):
            raise TrainingError(f"expected a torch checkpoint of format {FORMAT} in {path}, got {meta.backend} of format {meta.format}")
        state = TorchState(
            parameters=load_file(path / "model.safetensors"),
            optimizer=load_file(path / "optimizer.safetensors"),
            random=load_file(path / "random.safetensors"),
            stage=meta.stage,
            version=meta.version,
            digest=meta.digest,
        )
        return state, (path / "extra.bin").read_bytes()
    except (OSError, SafetensorError, msgspec.DecodeError) as error:
        raise TrainingError(f"no complete checkpoint in {path}: {error}", hint="list the run's checkpoints directory for others") from error
