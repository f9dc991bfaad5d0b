"""Reads the `.metadata` of torch.distributed.checkpoint, which is a pickle, and makes only the classes that such a file consists of.

torch itself would make whatever the file names, and so run whatever it says. Nothing else in streamrl unpickles.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

UNREADABLE = (pickle.UnpicklingError, EOFError, AttributeError, ImportError, LookupError, MemoryError, OverflowError, TypeError, ValueError)
"""Errors that bytes end in which are no pickle, or one of something else."""


class Reader(FileSystemReader):
    """torch's, but for `.metadata`: raises one of `UNREADABLE` where it is not what torch writes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            found = _Unpickler(file).load()
        if not isinstance(found, Metadata) or found.storage_data is None:
            raise ValueError("it does not describe a checkpoint")
        return found


class _Unpickler(pickle.Unpickler):
    # Megatron-core up to 0.15 has classes of its own, which are torch's with a field more.
    _OLD: ClassVar[dict[str, type]] = {
        "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": Metadata,
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": SavePlan,
    }
    _ALLOWED = re.compile(
        r"torch\.distributed\.checkpoint\.metadata\.(Metadata|TensorStorageMetadata|BytesStorageMetadata|TensorProperties|MetadataIndex"
        r"|ChunkStorageMetadata|StorageMeta|_MEM_FORMAT_ENCODING)|torch\.distributed\.checkpoint\.filesystem\._StorageInfo|torch\.Size"
        r"|torch\.distributed\.checkpoint\.planner\.(SavePlan|WriteItem|WriteItemType|TensorWriteData|BytesIOWriteData)"
        r"|torch\.serialization\._get_layout|collections\.OrderedDict|pathlib(\._local)?\.(Pure)?(Posix|Windows)Path"
    )

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "torch" and isinstance(found := getattr(torch, global_name, None), torch.dtype):
            return found
        if old := self._OLD.get(f"{module_name}.{global_name}"):
            return old
        if not self._ALLOWED.fullmatch(f"{module_name}.{global_name}"):
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}, which no checkpoint's does")
        return super().find_class(module_name, global_name)
