"""The numerics fingerprint: everything that may change a trained digit without the log or the configuration changing.

Two runs with equal fingerprints and equal logs are expected to give equal digests; with unequal ones a comparison needs a
tolerance. torch is imported for the torch backend only.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from streamrl.config.tree import Config


def numerics_fingerprint(config: Config) -> dict[str, str]:
    """Names and values; call it in the trainer's process after `make_trainer`, which sets threads and flags."""
    trainer = config.trainer
    found = {
        "backend": trainer.backend,
        "ranks": str(trainer.ranks),
        **({"shards": str(trainer.shards), "gather": trainer.gather} if trainer.shards > 1 else {}),
        **({"tensor": str(trainer.tensor), "megatron": _megatron()} if trainer.backend == "megatron" else {}),
        **({"experts": str(trainer.experts)} if trainer.experts > 1 else {}),
        **({"pipeline": str(trainer.pipeline)} if trainer.pipeline > 1 else {}),
        **({"context": str(trainer.context)} if trainer.context > 1 else {}),
        "minibatches": str(trainer.minibatches),
        "micro_tokens": str(trainer.micro_tokens),
        "dtype": config.trainer.dtype or config.model.dtype,
        "attention": "sdpa" if trainer.attention == "auto" else trainer.attention,
        "numerics": config.run.numerics,
        "machine": platform.machine(),
        "processor": _processor(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": np.__version__,
    }
    return {**found, **(_numpy_numerics() if trainer.tabular else _torch_numerics(config))}


def mesh_keys(values: Mapping[str, str]) -> dict[str, Any]:
    """Of a fingerprint what says on which ranks it was, as keys of the section `trainer`."""
    return {
        "backend": values.get("backend", "torch"),
        "tensor": int(values.get("tensor", "1")),
        "experts": int(values.get("experts", "1")),
        "pipeline": int(values.get("pipeline", "1")),
        "ranks": int(values.get("ranks", "1")),
        "shards": int(values.get("shards", "1")),
        "gather": values.get("gather", "auto"),
        "context": int(values.get("context", "1")),
    }


def fingerprint_digest(values: Mapping[str, str]) -> str:
    """16 hex digits of a fingerprint."""
    lines = "".join(f"{name}={values[name]}\n" for name in sorted(values))
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def fingerprint_difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """One line per entry that differs, such as `torch: 2.12.0 here, 2.13.0 there`."""
    names = sorted(set(ours) | set(theirs))
    return [f"{n}: {ours.get(n, 'nothing')} here, {theirs.get(n, 'nothing')} there" for n in names if ours.get(n) != theirs.get(n)]


def _megatron() -> str:
    from streamrl.trainers.megatron.buildable import check_installed

    return check_installed()


def _processor() -> str:
    # Kernels are chosen by model and cache sizes, not only by instruction set.
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _numpy_numerics() -> dict[str, str]:
    shown = np.show_config(mode="dicts") or {}
    return {"simd": ",".join(shown.get("SIMD Extensions", {}).get("found", []))}


def _torch_numerics(config: Config) -> dict[str, str]:
    import torch
    import transformers

    from streamrl.trainers.device import training_device, training_dtype
    from streamrl.trainers.torch.kernels import choose_kernels

    device = training_device(config.trainer)
    cuda = device.type == "cuda"
    kernels = choose_kernels(config, device, training_dtype(config))
    return {
        "attention": kernels.attention,
        **({"compile": "layers"} if kernels.compile else {}),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "cuda": str(torch.version.cuda) if cuda else "",
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "mkldnn": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
