"""Files of a torch trainer's checkpoint: safetensors, JSON and the caller's bytes; nothing in it is unpickled.

The tensors of a model that is cut are in one file for each part, written by the rank that holds it (`streamrl.models.tensor_files`).
Each rank of any mesh reads from them the rows that it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from streamrl.errors import TrainingError
from streamrl.models.directories import check_files, damaged, recover, unreadable
from streamrl.models.tensor_files import OFFSETS, Box, TensorFiles, part_files, part_folder
from streamrl.tensors.mesh import Mesh

FORMAT, FORMAT_PARTS = 1, 2
"""Formats of a checkpoint with one file for all of a model's tensors, and of one with a file for each part."""
STEP = ".step"
"""Ends the name of the one moment that has no rows: how many updates there were."""


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
    kl_factor: float = 1.0
    """The factor of the KL's coefficient, where it is adapted."""


class ModelState(msgspec.Struct, frozen=True, kw_only=True):
    """A model under training, as one rank holds it: all of its tensors, or their rows (dimension 0)."""

    parameters: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    digest: str
    """Digest of the whole parameters."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of the whole parameters."""
    types: Mapping[str, torch.dtype] = {}
    """Types of the parameters in a file, where they are others."""
    boxes: Mapping[str, Box] = {}
    """Boxes of the parameters in a part, where those are not rows."""

    def on_host(self, copy: Callable[[Tensor], Tensor]) -> ModelState:
        """The same, of tensors that `copy` has made, on the host."""
        parameters, optimizer = ({name: copy(value) for name, value in held.items()} for held in (self.parameters, self.optimizer))
        return replace(self, parameters=parameters, optimizer=optimizer)


class TorchState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the next step depends on."""

    policy: ModelState
    critic: ModelState | None
    random: dict[str, Tensor]
    stage: str
    version: str
    reference: ModelState | None = None
    """Without an optimizer; None where it is never renewed."""
    kl_factor: float = 1.0
    """See `streamrl.algorithms.kl_coefficient`."""

    def on_host(self, copy: Callable[[Tensor], Tensor]) -> TorchState:
        """The same, of tensors that `copy` has made, on the host."""
        critic, reference = (one.on_host(copy) if one is not None else None for one in (self.critic, self.reference))
        return replace(self, policy=self.policy.on_host(copy), critic=critic, reference=reference)


def host_copy(tensor: Tensor) -> Tensor:
    """A copy on the host, of its own memory."""
    return tensor.detach().to("cpu", copy=True)


def random_state(device: torch.device) -> dict[str, Tensor]:
    """State of the random generators, of its own memory."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Take what `random_state` gave."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def write_tensors(directory: Path, state: TorchState, mesh: Mesh, part: int) -> None:
    """Write what one rank holds of all models into an existing directory."""
    for model, stem in ((state.policy, "model"), (state.critic, "critic"), (state.reference, "reference")):
        if model is not None:
            parameters = {name: value.to(model.types.get(name, value.dtype)) for name, value in model.parameters.items()}
            _save(directory / f"{stem}.safetensors", parameters, model.shapes, mesh, part, model.boxes)
    for model, stem in ((state.policy, "optimizer"), (state.critic, "critic_optimizer")):
        if model is not None:
            shapes = {name: model.shapes[name.rpartition(".")[0]] for name in model.optimizer if not name.endswith(STEP)}
            _save(directory / f"{stem}.safetensors", model.optimizer, shapes, mesh, part, model.boxes)


def write_checkpoint(directory: Path, state: TorchState, extra: bytes, mesh: Mesh) -> None:
    """Write what rank 0 writes of a checkpoint into an existing directory: all of it, or of a model that is cut all but the other parts."""
    own = directory / part_folder(0, mesh.shard) if mesh.shard > 1 else directory
    own.mkdir(exist_ok=True)
    write_tensors(own, state, mesh, 0)
    save_file(state.random, directory / "random.safetensors")
    (directory / "extra.bin").write_bytes(extra)
    meta = Meta(
        format=FORMAT_PARTS if mesh.shard > 1 else FORMAT,
        backend="torch",
        version=state.version,
        stage=state.stage,
        digest=state.policy.digest,
        critic=state.critic.digest if state.critic is not None else "",
        reference=state.reference.digest if state.reference is not None else "",
        kl_factor=state.kl_factor,
    )
    (directory / "meta.json").write_bytes(msgspec.json.format(msgspec.json.encode(meta)))


def read_checkpoint(
    path: Path, mesh: Mesh, part: int, *, check: bool = True, boxes: Mapping[str, Box] = MappingProxyType({})
) -> tuple[TorchState, bytes]:
    """Read what one rank of a mesh holds of the state, and the caller's bytes.

    Args:
        path: of the checkpoint, of whatever mesh.
        mesh: that reads it.
        part: of the mesh.
        check: hold all files against their seals; else somebody has.
        boxes: what is read of a parameter, of its masters and moments, where that is not the rows that the mesh says.

    Raises:
        CheckpointDamaged: it is gone, or not what was written.
        TrainingError: it has another format.
    """
    recover(path)
    if check:
        check_files(path)
    try:
        meta = msgspec.json.decode((path / "meta.json").read_bytes(), type=Meta)
        if meta.backend != "torch" or meta.format not in (FORMAT, FORMAT_PARTS):
            raise TrainingError(
                f"expected a torch checkpoint of format {FORMAT} or {FORMAT_PARTS} in {path}, got {meta.backend} of format {meta.format}"
            )

        def read(stem: str, optimizer: str, digest: str) -> ModelState:
            parameters, shapes = _read(path, stem, mesh, part, boxes)
            moments = _read(path, optimizer, mesh, part, boxes)[0] if optimizer else {}
            return ModelState(parameters=parameters, optimizer=moments, digest=digest, shapes=shapes)

        state = TorchState(
            policy=read("model", "optimizer", meta.digest),
            critic=read("critic", "critic_optimizer", meta.critic) if meta.critic else None,
            random=load_file(path / "random.safetensors"),
            stage=meta.stage,
            version=meta.version,
            reference=read("reference", "", meta.reference) if meta.reference else None,
            kl_factor=meta.kl_factor,
        )
        return state, (path / "extra.bin").read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error
    except (SafetensorError, msgspec.DecodeError) as error:
        raise damaged(path, str(error)) from error


def _save(
    file: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, part: int, boxes: Mapping[str, Box]
) -> None:
    """One safetensors file; what has no rows is in that of the first part, and parts without rows are left out."""
    if mesh.shard == 1:
        save_file(dict(tensors), file, metadata={"format": "pt"})
        return
    held = {name: value for name, value in tensors.items() if (value.numel() if name in shapes else part == 0)}

    def offset(name: str) -> tuple[int, ...]:
        box = _box_of(name, boxes)
        return box.offset if box is not None else mesh.slice(shapes[name], part)[0]

    offsets = {name: {"saved_offsets": offset(name) if name in shapes else ()} for name in held}
    save_file(held, file, metadata={"format": "pt", "DCP_VERSION": "1.0", OFFSETS: json.dumps(offsets)})


def _read(path: Path, stem: str, mesh: Mesh, part: int, boxes: Mapping[str, Box]) -> tuple[dict[str, Tensor], dict[str, tuple[int, ...]]]:
    """Read what part `part` holds of all tensors of a file, and the tensors' shapes."""
    found: dict[str, Tensor] = {}
    with TensorFiles(part_files(path, f"{stem}.safetensors")) as files:
        for name, one in files.tensors.items():
            box = _box_of(name, boxes) or (Box(*mesh.slice(one.shape, part)) if mesh.shard > 1 else None)
            found[name] = files.read(name, box if one.shape else None)
        return found, {name: one.shape for name, one in files.tensors.items()}


def _box_of(name: str, boxes: Mapping[str, Box]) -> Box | None:
    """Find the box of a parameter, or of one of its masters and moments, whose names are the parameter's and a word."""
    return boxes.get(name) or boxes.get(name.rpartition(".")[0])
