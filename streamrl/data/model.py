"""The model directory a run starts from: the user's, or a tiny one with random weights that is built on the spot."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from streamrl.config.loss import SOFTMAX_ROUTERS
from streamrl.config.tree import Config, ModelConfig
from streamrl.data.byte_pairs import training_texts, write_byte_pairs
from streamrl.data.characters import END, SPECIALS, VOCAB_SIZE, write_tokenizer
from streamrl.errors import ConfigError
from streamrl.system import new_directory
from streamrl.tensors.building import BUILDING


def ensure_model(config: Config, directory: Path) -> Path:
    """The model directory of a run: `model.path` where it is set, else `directory`, built there on the first call.

    A directory that exists is complete (it is renamed into place), so calling it again costs nothing. With `model.vocab_size` the tokenizer
    is trained on the rows of `data.train`, which must then be there.
    """
    if config.model.path:
        path = Path(config.model.path)
        wanted = config.engine.traits.model_file
        if not (path / wanted).is_file():
            gguf = next(path.glob("*.gguf"), None)
            download = "download the model, or leave model.path empty to have a tiny one built"
            raise ConfigError(
                f"expected a model directory with a {wanted}, got {'a GGUF file' if gguf else 'none'} in {path}",
                hint=f"`streamrl convert {gguf} DIR` writes one from this file" if gguf else download,
                key="model.path",
                path=str(path),
            )
        return path
    if directory.is_dir():
        return directory
    if config.engine.traits.tabular:
        _build(directory, lambda target: write_table(target, max_position=config.sampling.max_new_tokens))
    else:
        texts = training_texts(config.data) if config.model.vocab_size else ()
        _build(directory, lambda target: write_qwen3(target, config.model, seed=config.run.seed, texts=texts))
    return directory


def check_positions(config: Config, directory: Path) -> None:
    """Raise ConfigError when `model.max_len` is beyond the positions of the model in `directory`; one that does not say passes."""
    described = _description(directory)
    positions = described.get("max_position_embeddings")
    scaling = described.get("rope_parameters") or described.get("rope_scaling") or {}
    if not isinstance(positions, int):
        return
    # Some descriptions give the positions before they are scaled; those that name the original ones give them after.
    scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type", scaling.get("type")) == "llama3"
    positions = positions if scaled else int(positions * scaling.get("factor", 1))
    if config.model.max_len > positions:
        raise ConfigError(
            f"expected model.max_len of at most {positions}, the positions of the model in {directory}, got {config.model.max_len}",
            hint="lower model.max_len, or take a model with more positions",
            key="model.max_len",
            positions=positions,
        )


def check_experts(config: Config, directory: Path) -> None:
    """Raise ConfigError when the configuration asks something of routers that the model in `directory` has not."""
    kind = _description(directory).get("model_type", "no model_type")
    asked = {f"loss.experts.{key}": getattr(config.loss.experts, key) for key in ("balance_coef", "z_coef")}
    for key, value in (asked | {"trainer.routing_replay": config.trainer.routing_replay}).items():
        if value and kind not in SOFTMAX_ROUTERS:
            raise ConfigError(
                f"{key} = {str(value).lower()} is for {', '.join(SOFTMAX_ROUTERS)}, got a model of {kind} in {directory}",
                hint=f"leave {key} out",
                key=key,
                got=kind,
            )


def check_context(config: Config, directory: Path) -> None:
    """Raise ConfigError when ranks are to share rows of a model that `directory` describes as one with windows or caps in its attention."""
    text = _description(directory)
    odd = sorted({kind for kind in text.get("layer_types") or () if kind != "full_attention"})
    if not text.get("layer_types") and text.get("sliding_window") is not None and text.get("use_sliding_window", True):
        odd.append(f"sliding_window = {text['sliding_window']}")
    if text.get("attn_logit_softcapping"):
        odd.append(f"attn_logit_softcapping = {text['attn_logit_softcapping']}")
    if config.trainer.context > 1 and odd:
        raise ConfigError(
            f"trainer.context = {config.trainer.context} needs layers that attend to all that is before a token, got a model with "
            f"{', '.join(odd)} in {directory}",
            hint="set trainer.context = 1",
            key="trainer.context",
            got=config.trainer.context,
        )


def _description(directory: Path) -> dict[str, Any]:
    """The language model's part of a directory's config.json; nothing where there is none. Raises ConfigError for what is none."""
    path = directory / "config.json"
    if not path.is_file():
        return {}
    try:
        described = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(described.get("text_config") or described, dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"expected the description of a model in {path}, got none: {error}",
            hint="download the model again, or correct model.path",
            key="model.path",
            path=str(path),
        ) from error


def write_table(directory: Path, *, max_position: int) -> None:
    """Write the description of a tabular policy (`table.json`) and the character tokenizer; its logits begin at zero.

    Args:
        directory: made if it is not there.
        max_position: positions of a response with their own table; later ones share the last.
    """
    write_tokenizer(directory)
    table = {"vocab": VOCAB_SIZE, "max_position": max_position, "eos": SPECIALS.index(END)}
    (directory / "table.json").write_text(json.dumps(table) + "\n", encoding="utf-8")


def write_qwen3(directory: Path, config: ModelConfig, *, seed: int, texts: Iterable[str] = ()) -> None:
    """Write a Qwen3 with random weights (safetensors) and its tokenizer. The global random state is left as it was.

    The defaults give 0.41 million parameters; the head dimension is hidden / heads, embeddings are tied.

    Args:
        directory: made if it is not there.
        config: the architecture.
        seed: of the weights.
        texts: what the tokenizer is trained on where `config.vocab_size` asks for byte-pair encoding.
    """
    import safetensors.torch
    import torch
    import transformers

    end, pad = SPECIALS.index(END), SPECIALS.index("<|pad|>")
    architecture = transformers.Qwen3Config(
        vocab_size=config.vocab_size or VOCAB_SIZE,
        hidden_size=config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        intermediate_size=config.intermediate,
        max_position_embeddings=config.max_len,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        architectures=["Qwen3ForCausalLM"],
        dtype=config.dtype,
    )
    with BUILDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.Qwen3ForCausalLM(architecture)
    weights = {name: parameter.detach().to(getattr(torch, config.dtype)) for name, parameter in model.named_parameters()}
    if config.vocab_size:
        write_byte_pairs(directory, texts, vocab_size=config.vocab_size)
    else:
        write_tokenizer(directory)
    architecture.save_pretrained(directory)
    transformers.GenerationConfig(eos_token_id=end, pad_token_id=pad).save_pretrained(directory)
    safetensors.torch.save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def _build(directory: Path, write: Callable[[Path], None]) -> None:
    """Have `write` fill a directory that nobody sees before it is complete."""
    try:
        with new_directory(directory) as scratch:
            write(scratch)
            scratch.chmod(0o755)
    except OSError as error:
        # Somebody else built the same model at the same time; theirs is complete.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
