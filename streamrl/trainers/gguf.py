"""A GGUF file, as llama.cpp reads it, written as a Hugging Face model directory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from streamrl.config.files import check_new, new_directory
from streamrl.errors import ConfigError, TrainingError


class Written(NamedTuple):
    """Counts what a conversion wrote."""

    tensors: int
    nbytes: int


def write_from_gguf(source: Path, dest: Path) -> Written:
    """Write the model and the tokenizer of a GGUF file in bfloat16; `dest` appears whole or not at all.

    Weights that the file holds in fewer bits stay the values that those bits say, rounded to bfloat16. The chat template and the end
    token come from the file.

    Args:
        source: the file; transformers knows its architecture, see its page on GGUF.
        dest: new directory.

    Raises:
        ConfigError: `dest` exists, a package is missing, or transformers cannot read the file.
        TrainingError: `dest` cannot be written.
    """
    check_new(dest)
    _check_packages()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ConfigError(
            f"expected a GGUF file of an architecture that transformers reads, got {source}: {error}",
            hint="convert it with llama.cpp's tools, or take the model's own Hugging Face directory",
            path=str(source),
        ) from error
    config = read.config
    for key in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, key):
            delattr(config, key)
    config.dtype = torch.bfloat16
    # What was read from quantized weights refuses to be saved, so a model that never was quantized takes them.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    try:
        with new_directory(dest) as scratch:
            model.save_pretrained(scratch)
            tokenizer.save_pretrained(scratch)
            scratch.chmod(0o755)
    except OSError as error:
        raise TrainingError(f"expected to write {dest}, got: {error}", hint="is there room, and may this user write there?") from error
    parameters = list(model.parameters())
    return Written(len(parameters), sum(each.numel() * each.element_size() for each in parameters))


def _check_packages() -> None:
    """Raise ConfigError where one of the packages is missing that transformers asks for late, in words of its own."""
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages accelerate and gguf, without which transformers reads no GGUF, got no {' and no '.join(missing)}",
            hint="pip install 'streamrl[gguf]'",
            got=missing,
        )
