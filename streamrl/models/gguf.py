"""A GGUF file, as llama.cpp reads it, written as a Hugging Face model directory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import TemplateError

from streamrl.errors import ConfigError
from streamrl.models.directories import write_directory
from streamrl.system import check_new

_ANSWER = "answer"
_ROPE_SCALING = ("rope.scaling.type", "rope.scaling.factor")


class Written(NamedTuple):
    """Counts what a conversion wrote."""

    tensors: int
    nbytes: int


def write_from_gguf(source: Path, dest: Path) -> Written:
    """Write the model and the tokenizer of a GGUF file in bfloat16; `dest` appears whole or not at all.

    Weights that the file holds in fewer bits stay the values that those bits say, rounded to bfloat16. The chat template comes from the
    file, and an answer ends at its end token, or at the one by which the template ends a turn.

    Args:
        source: the file; transformers knows its architecture, see its page on GGUF.
        dest: new directory.

    Raises:
        ConfigError: `dest` exists, a package is missing, the file lacks a part of the model, or transformers does not read all of it.
        TrainingError: `dest` cannot be written.
    """
    check_new(dest)
    _check_packages()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        read, found = load(source.parent, gguf_file=source.name, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        raise ConfigError(
            f"expected a GGUF file of an architecture that transformers reads, got {source}: {error}",
            hint="is it whole? Else convert it with llama.cpp's tools, or take the model's own Hugging Face directory",
            path=str(source),
        ) from error
    config = read.config
    _check_read(source, config, sorted(found["missing_keys"]))
    for key in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, key):
            delattr(config, key)
    config.dtype = torch.bfloat16
    # What was read from quantized weights refuses to be saved, so a model that never was quantized takes them.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    ends = _end_ids(tokenizer)
    model.generation_config.eos_token_id = ends[0] if len(ends) == 1 else ends or None

    def write(directory: Path) -> None:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    write_directory(dest, write, replace=False)
    parameters = list(model.parameters())
    return Written(len(parameters), sum(each.numel() * each.element_size() for each in parameters))


def _check_read(source: Path, config: Any, missing: list[str]) -> None:
    """Raise ConfigError where the model would be another than that of the file, about which transformers says nothing."""
    if missing:
        raise ConfigError(
            f"expected all tensors of a {config.model_type} model in {source}, got none for {missing[0]}, one of {len(missing)}",
            hint="join a file that comes in parts with llama-gguf-split --merge",
            path=str(source),
            missing=missing,
        )
    from gguf import GGUFReader

    fields = GGUFReader(source).fields
    said = {key: field.contents() for key, field in fields.items() if key.partition(".")[2] in _ROPE_SCALING}
    kind, factor = (next((value for key, value in said.items() if key.endswith(name)), None) for name in _ROPE_SCALING)
    lost = ""
    if kind not in (None, "none") and factor != 1 and "factor" not in str(config.rope_parameters):
        lost = f"rope.scaling.type = {kind}"
    # The file does not say by what Gemma's scores are scaled, and in its largest models that is not the default.
    if (scale := getattr(config, "query_pre_attn_scalar", None)) is not None and scale != config.head_dim:
        lost = f"heads of {config.head_dim}, whose scores are scaled as those of {scale}"
    if lost:
        raise ConfigError(
            f"expected a GGUF file of which transformers reads all that a {config.model_type} computes with, got {source} with {lost}",
            hint="take the model's own Hugging Face directory",
            path=str(source),
            got=lost,
        )


def _end_ids(tokenizer: Any) -> list[int]:
    """The end token, and the special token by which the chat template ends an answer where that is another (Gemma's <end_of_turn>)."""
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": _ANSWER}]
        try:
            closing: str = tokenizer.apply_chat_template(turns, tokenize=False).rpartition(_ANSWER)[2]
        except (TemplateError, TypeError):  # it refuses these messages, or reads more of them than is there
            return ends
        special = {each for each, token in tokenizer.added_tokens_decoder.items() if token.special}
        first = tokenizer(closing, add_special_tokens=False).input_ids[:1]
        ends += [each for each in first if each in special and each not in ends]
    return ends


def _check_packages() -> None:
    """Raise ConfigError where one of the packages is missing that transformers asks for late, in words of its own."""
    missing = [name for name in ("accelerate", "gguf") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"expected the packages accelerate and gguf, without which transformers reads no GGUF, got no {' and no '.join(missing)}",
            hint="pip install 'streamrl[gguf]'",
            got=missing,
        )
