"""Whether the models of a run fit its GPUs, before anything is loaded."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from streamrl.config.tree import Config
from streamrl.core.packing import ROW
from streamrl.doctor.backend import divides
from streamrl.doctor.findings import Check
from streamrl.errors import LaunchError
from streamrl.trainers.activations import GIB, Cut, ModelShape, model_shape
from streamrl.trainers.memory import RankMemory, itemsize_of, models_of, rank_memory

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of them is there where torch can see a GPU."""
_SAY_MEMORY = (
    "import json, torch; "
    "print(json.dumps([torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count())]))"
)
_START_S = 120.0
_MOST_SHARDS = 64
_SETS = {"flip": 2, "copy": 2}
"""Sets of weights that an engine on SGLang has on its GPU, by the way they change; else one, at least."""


async def gpu_memories(drivers: Sequence[str] = _DRIVERS) -> list[int]:
    """Bytes of each GPU that a worker would see, asked of torch in a process of its own: whoever asks need not load it.

    Raises:
        LaunchError: torch does not answer.
    """
    if not _any_there(drivers):
        return []
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", _SAY_MEMORY, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(_START_S):
            out, said = await child.communicate()
    except TimeoutError as error:
        raise LaunchError(f"torch has not told within {_START_S:g} s what GPUs there are", hint="does nvidia-smi answer?") from error
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode != 0:
        why = said.decode(errors="replace").strip().rpartition("\n")[2]
        raise LaunchError(f"torch cannot tell what GPUs there are: {why}", hint="see `streamrl doctor`")
    return json.loads(out)


def least_memory(config: Config, gpus: Sequence[int]) -> int:
    """Of the memories of all GPUs the least that a rank of the trainer gets; 0 where no rank has one, or Ray takes them of other nodes."""
    if config.trainer.device == "cpu" or config.trainer.tabular or config.ray.address not in ("", "local"):
        return 0
    first = config.trainer.gpu
    return min(gpus if config.ray.address else gpus[first : first + config.trainer.ranks], default=0)


def check_activations(config: Config, gpu_bytes: int) -> Check | None:
    """How many layers would keep their activations if the trainer had the GPU for itself; None where that is not known, or all do."""
    trainer, found, models = config.trainer, _reckoned(config, gpu_bytes), models_of(config, read_shape)
    if found is None or models is None:
        return None
    cut = Cut(trainer.tensor, trainer.pipeline)
    shapes, itemsize = [shape for _, shape in models.trained], itemsize_of(config)
    packed, compiled = _packed(config), _compiled(config)
    # As the trainer does: rows of the whole budget where all layers keep their activations then, else short ones.
    for row in (trainer.micro_tokens, min(trainer.micro_tokens, ROW) if packed else trainer.micro_tokens):
        estimate = cut.least_kept(
            shapes,
            free_bytes=gpu_bytes,
            needed_bytes=found.nbytes,
            tokens=-(-row // trainer.context),
            itemsize=itemsize,
            compiled=compiled,
            context=trainer.context,
        )
        if estimate.all_kept:
            break
    if isinstance(asked := trainer.activations, str):
        enough = asked == "auto" or estimate.all_kept
    else:
        enough = asked <= estimate.kept or estimate.all_kept
    if estimate.fits and enough:
        return Check("activations", "ok", estimate.text)
    hint = "lower trainer.micro_tokens or trainer.activations, or take a larger GPU; a step that is out of memory halves its micro-batches"
    return Check("activations", "warn", estimate.text, hint)


def check_trainer_memory(config: Config, gpu_bytes: int) -> Check | None:
    """Whether a rank can hold its part of the models and one sample of the greatest length; None where that is not known.

    What is reckoned is the least that it takes: no layer keeps its activations unless that is asked for, the head takes nothing, and
    nothing else is on the GPU.
    """
    found = _reckoned(config, gpu_bytes)
    if found is None:
        return None
    longest = _longest(config)
    needed = found.nbytes + longest * found.token
    text = (
        f"a rank takes {found.text} + {longest * found.token / GIB:.1f} for a sample of {longest} tokens = {needed / GIB:.1f} GiB at least"
    )
    text += f", its GPU has {gpu_bytes / GIB:.1f}"
    if found.making > gpu_bytes:
        text = f"a rank takes {found.making / GIB:.1f} GiB for a model before it is cut, its GPU has {gpu_bytes / GIB:.1f}"
        return Check("trainer memory", "fail", text, "take a larger GPU, or a smaller model")
    if needed <= gpu_bytes:
        return Check("trainer memory", "ok", text)
    hint = _fitting_parts(config, gpu_bytes)
    if found.nbytes + found.token <= gpu_bytes:
        tokens = (gpu_bytes - found.nbytes) // found.token
        hint = f"data.max_prompt_tokens + sampling.max_new_tokens = {tokens} fit; {hint}{_fitting_context(config, gpu_bytes)}"
    return Check("trainer memory", "fail", text, hint)


def check_shared_gpus(config: Config, gpu_bytes: int) -> Check | None:
    """Whether trainer and SGLang fit one GPU together; None where they share none, or that is not known.

    What does not fit in any order of their starts fails; what does not where the engine starts first is a warning.
    """
    found, models = _reckoned(config, gpu_bytes), models_of(config, read_shape)
    engines = _engines_beside(config)
    if found is None or models is None or not engines:
        return None
    sglang = config.engine.sglang
    policy = models.trained[0][1]
    sets = _SETS.get(sglang.swap, 1)
    weights = sets * itemsize_of(config) * -(-policy.parameters // sglang.tensor_parallel)
    trainer = found.nbytes + _longest(config) * found.token
    beside = f"beside {engines} engine{'s' if engines > 1 else ''}"
    least = int(100 * weights / gpu_bytes) + 1
    most = int(100 * (gpu_bytes - trainer) / gpu_bytes / engines)
    text = (
        f"trainer {beside} on one GPU of {gpu_bytes / GIB:.1f} GiB: {found.text} + {_longest(config) * found.token / GIB:.1f} for a sample "
    )
    text += f"= {trainer / GIB:.1f} GiB at least; an engine's weights, {sets} of them, {weights / GIB:.1f}"
    key = "engine.sglang.flags.mem_fraction_static"
    fits = f"set {key} to {most / 100:g} at most" if most >= least else "take another GPU with engine.sglang.gpus, or a smaller model"
    if sets == 2 and most < least:
        fits += "; engine.sglang.swap = 'copy_pinned' keeps the second set in the host's memory"
    fraction = sglang.flags.get("mem_fraction_static")
    if not isinstance(fraction, int | float):
        text += "; SGLang chooses its fraction of the memory by itself"
        return Check("shared gpu", "warn" if most >= least else "fail", text, fits)
    text += f"; it takes {key} = {fraction:g} of the memory, {fraction * gpu_bytes / GIB:.1f}"
    if 100 * fraction < least - 1:
        return Check("shared gpu", "fail", f"{text}: too little for its weights", f"raise it above {weights / gpu_bytes:.2f}; {fits}")
    # SGLang takes its fraction of what is free when it starts: before the first step, which waits for it, the trainer has no gradients
    # and moments yet, and at most all else; several engines start one after the other.
    held = found.nbytes - found.growing
    taken = (gpu_bytes - held) * (1 - (1 - fraction) ** engines)
    if trainer + taken > gpu_bytes:
        text += f", or {taken / GIB:.1f} behind a trainer that has no gradients and moments yet ({held / GIB:.1f})"
        text += f": at least {trainer / GIB:.1f} + {taken / GIB:.1f} = {(trainer + taken) / GIB:.1f} GiB in all"
        return Check("shared gpu", "fail", text, fits)
    if trainer + engines * fraction * gpu_bytes > gpu_bytes:
        total = (trainer + engines * fraction * gpu_bytes) / GIB
        return Check("shared gpu", "warn", f"{text}: {total:.1f} GiB in all where the engine starts first", fits)
    return Check("shared gpu", "ok", text)


def check_gpu_memory(config: Config, gpu_bytes: int) -> list[Check]:
    """What can be said of a trainer on GPUs of `gpu_bytes`."""
    found = [check(config, gpu_bytes) for check in (check_activations, check_trainer_memory, check_shared_gpus)]
    return [check for check in found if check is not None]


def read_shape(model: str) -> ModelShape | None:
    """Sizes of the model in a directory, as far as its description tells them."""
    try:
        return model_shape(json.loads((Path(model) / "config.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return None


def _any_there(paths: Sequence[str]) -> bool:
    return any(Path(path).exists() for path in paths)


def _reckoned(config: Config, gpu_bytes: int) -> RankMemory | None:
    """None where nothing is on a GPU, or the policy's shape is not known."""
    if not gpu_bytes or config.trainer.device == "cpu" or (models := models_of(config, read_shape)) is None:
        return None
    return rank_memory(config, models, gpu_bytes=gpu_bytes, compiled=_compiled(config))


def _packed(config: Config) -> bool:
    attention = config.trainer.attention
    return attention == "packed" or (attention == "auto" and (itemsize_of(config) == 2 or config.trainer.context > 1))


def _compiled(config: Config) -> bool:
    asked = config.trainer.compile
    return asked == "on" or (asked == "auto" and config.trainer.tensor == 1 and _packed(config) and config.run.numerics != "bitwise")


def _longest(config: Config) -> int:
    """Tokens that a sample may have: those that the user's own producers put together, we do not know."""
    return config.data.max_prompt_tokens + config.sampling.max_new_tokens


def _fitting_parts(config: Config, gpu_bytes: int) -> str:
    trainer, shape = config.trainer, read_shape(config.model.path)
    keys = ("shards",) if trainer.backend == "torch" else ("experts",) if shape is not None and shape.met else ("tensor", "pipeline")
    for key in keys:
        before: int = getattr(trainer, key)
        parts = before
        while (parts := 2 * parts) <= _MOST_SHARDS:
            cut = replace(config, trainer=replace(trainer, ranks=trainer.ranks // before * parts, **{key: parts}))
            if not divides(cut):
                break
            found = _reckoned(cut, gpu_bytes)
            if found is not None and max(found.making, found.nbytes + _longest(config) * found.token) <= gpu_bytes:
                multiple = "it" if cut.trainer.tensor == 1 or key == "tensor" else f"{cut.trainer.tensor} x {parts}"
                return f"trainer.{key} = {parts}, with trainer.ranks a multiple of {multiple}, would fit GPUs of this size"
    return "take a larger GPU, a smaller model, weights.ring = 1, or leave out what else is loaded"


def _fitting_context(config: Config, gpu_bytes: int) -> str:
    trainer = config.trainer
    context = trainer.context
    while (context := 2 * context) <= _MOST_SHARDS:
        shared = replace(config, trainer=replace(trainer, ranks=trainer.ranks * context // trainer.context, context=context))
        found = _reckoned(shared, gpu_bytes)
        if found is not None and found.nbytes + _longest(config) * found.token <= gpu_bytes:
            return f"; or trainer.context = {context}, with trainer.ranks a multiple of it, by which ranks share a sample"
    return ""


def _engines_beside(config: Config) -> int:
    """Engines of SGLang on the GPU of a rank that shares it with most of them; with Ray that is not known."""
    sglang, trainer = config.engine.sglang, config.trainer
    if config.engine.traits.gpus != "own" or sglang.flags.get("device") == "cpu" or config.ray.address:
        return 0
    size, gpus = sglang.tensor_parallel, sglang.gpus or tuple(range(sglang.tensor_parallel))
    taken: list[int] = []
    for index in range(config.engine.workers + config.evaluation.engines):
        place = index % max(1, len(gpus) // size)  # as `streamrl.engines.sglang.command.visible_devices` has it
        taken += gpus[place * size : (place + 1) * size]
    return max(taken.count(gpu) for gpu in range(trainer.gpu, trainer.gpu + trainer.ranks))
