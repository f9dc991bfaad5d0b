"""How an SGLang server is started: its arguments, its environment, and a folder from which it finds our plugin. No process here."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamrl
from streamrl.config.engines import EngineConfig, SglangConfig

SPARE_TOKENS = 8
"""SGLang keeps a few positions of its context length for itself; requests end at the model's longest length by us."""
MOST_IN_GRAPH = 512
"""Larger batches run without a graph: their forward pass takes longer than its launch, and each graph holds memory."""
PLUGIN_GROUP = "sglang.srt.plugins"
PLUGIN_NAME = "streamrl"
PLUGIN_TARGET = "streamrl.engines.sglang.plugin:register"
QUICK_START = "streamrl.engines.sglang.quick_start"


def arguments(
    config: EngineConfig, model_dir: Path, *, port: int, max_len: int, dtype: str, has_weights: bool, secret_file: Path
) -> tuple[str, ...]:
    """The command line, without the interpreter's own part.

    Args:
        config: `slots`, `deterministic` and the section `sglang`.
        model_dir: a Hugging Face model directory.
        port: on loopback.
        max_len: longest sequence in tokens.
        dtype: type of the weights as they are published.
        has_weights: whether `model_dir` holds weights; without any the server begins with random ones, and serves none of them.
        secret_file: YAML file with the api key, which must not stand in a command line that everybody on the host can read.
    """
    sglang = config.sglang
    flags: dict[str, Any] = {
        "config": str(secret_file),
        "model_path": str(model_dir),
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "tp_size": sglang.tensor_parallel,
        "context_length": max_len + SPARE_TOKENS,
        "max_running_requests": config.slots,
        # A server that is to know grammars reads the tokenizer; requests are token ids all the same.
        "skip_tokenizer_init": not sglang.grammar_backend,
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        # An idle scheduler polls else, and keeps the interpreter from the thread that stages weights.
        "sleep_on_idle": True,
        "enable_deterministic_inference": config.deterministic,
        # A line for every request otherwise.
        "log_level_http": "warning",
    }
    if not has_weights:
        flags["load_format"] = "dummy"
    own = {name.lstrip("-").replace("-", "_"): value for name, value in sglang.flags.items()}
    flags |= _graph_flags(config.slots, own) | own
    if sglang.grammar_backend:
        flags["grammar_backend"] = sglang.grammar_backend
    return tuple(word for name, value in flags.items() for word in _words(name, value))


def _words(name: str, value: Any) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag] if value else []
    if isinstance(value, (list, tuple)):
        return [flag, *(str(item) for item in value)]
    return [flag, json.dumps(value) if isinstance(value, Mapping) else str(value)]


def interpreter(sglang: SglangConfig) -> str:
    """The interpreter that has SGLang."""
    return sglang.python or sys.executable


def graph_sizes(slots: int) -> tuple[int, ...]:
    """The numbers of sequences that CUDA graphs of decoding are captured for: at most twelve, the largest one `slots` or `MOST_IN_GRAPH`.

    A batch is padded to the next size. Above 64 the padding is at most a quarter of it; below, where a forward pass takes the time that it
    takes to read the weights, less than half. Sizes are multiples of 16, for Triton compiles its kernels once more for others.
    """
    sizes = [min(slots, MOST_IN_GRAPH)]
    while sizes[-1] > 16:
        less = 3 * sizes[-1] / 4 if sizes[-1] > 64 else sizes[-1] / 2
        sizes.append(min(16 * math.ceil(less / 16), 16 * math.ceil(sizes[-1] / 16) - 16))
    return tuple(reversed(sizes))


def _graph_flags(slots: int, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags for the sizes of decode graphs; none where the user has named graphs in any way, or there is no GPU."""
    if flags.get("device") == "cpu" or any("cuda_graph" in name for name in flags if "prefill" not in name):
        return {}
    sizes = graph_sizes(slots)
    return {"cuda_graph_max_bs_decode": sizes[-1], "cuda_graph_bs_decode": sizes}


def program(sglang: SglangConfig) -> tuple[str, ...]:
    """Arguments of the interpreter: they start SGLang's server, by `streamrl.engines.sglang.quick_start` or directly."""
    return ("-m", *((QUICK_START,) if sglang.quick_start else ()), "sglang.launch_server")


def environment(
    sglang: SglangConfig, surroundings: Mapping[str, str], *, site: Path, plugin: Mapping[str, Any] | None, index: int, num_gpus: int
) -> dict[str, str]:
    """The server's environment.

    Args:
        sglang: `env`, `gpus` and `tensor_parallel` are used.
        surroundings: the worker's environment.
        site: folder made by `write_site`.
        plugin: settings of the plugin, None to leave it asleep.
        index: number of the engine worker, which decides its GPUs.
        num_gpus: GPUs that this process sees.
    """
    env = dict(surroundings)
    # SGLang asks itself for a token at every GET /health otherwise, and takes a second for it.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    env["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    env["HF_HUB_OFFLINE"] = env.get("HF_HUB_OFFLINE", "1")
    env["PYTHONUNBUFFERED"] = "1"
    if sglang.flags.get("device") == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
    if devices := visible_devices(sglang, env.get("CUDA_VISIBLE_DEVICES"), index=index, num_gpus=num_gpus):
        env["CUDA_VISIBLE_DEVICES"] = devices
    env |= sglang.env
    path = [str(site), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    env["PYTHONPATH"] = os.pathsep.join(path)
    env.pop("STREAMRL_PLUGIN", None)
    if plugin is not None:
        env["STREAMRL_PLUGIN"] = json.dumps(plugin)
        allowed = [name for name in env.get("SGLANG_PLUGINS", "").split(",") if name]
        if allowed and PLUGIN_NAME not in allowed:
            env["SGLANG_PLUGINS"] = ",".join([*allowed, PLUGIN_NAME])
    return env


def visible_devices(sglang: SglangConfig, visible: str | None, *, index: int, num_gpus: int) -> str:
    """CUDA_VISIBLE_DEVICES of engine `index`: its own GPUs first, then the others.

    The others stay visible because a trainer's memory on them can be opened only by a process that sees them. Empty: leave it as it is.
    """
    if not sglang.gpus:
        return ""
    names = [name.strip() for name in visible.split(",") if name.strip()] if visible else [str(gpu) for gpu in range(num_gpus)]
    size = sglang.tensor_parallel
    place = index % max(1, len(sglang.gpus) // size)
    own = [names[gpu] if gpu < len(names) else str(gpu) for gpu in sglang.gpus[place * size : (place + 1) * size]]
    return ",".join([*own, *(name for name in names if name not in own)])


def count_gpus(devices: Path = Path("/dev")) -> int:
    """GPUs of NVIDIA that this process may open."""
    return sum(1 for path in devices.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def write_site(folder: Path) -> Path:
    """Make a folder for PYTHONPATH that holds this package and the plugin's entry point, whatever interpreter the server has.

    SGLang finds plugins by the entry points of installed distributions; putting our own site-packages into the path of another
    environment would hide its packages.
    """
    site = folder / "site"
    info = site / f"streamrl-{streamrl.__version__}.dist-info"
    info.mkdir(parents=True)
    (site / "streamrl").symlink_to(Path(streamrl.__file__).resolve().parent, target_is_directory=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: streamrl\nVersion: {streamrl.__version__}\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{PLUGIN_GROUP}]\n{PLUGIN_NAME} = {PLUGIN_TARGET}\n", encoding="utf-8")
    return site


def holds_weights(model_dir: Path) -> bool:
    """Whether a model directory has weights that SGLang can load."""
    return any(next(model_dir.glob(pattern), None) is not None for pattern in ("*.safetensors", "*.bin", "*.pt"))
