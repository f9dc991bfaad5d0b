"""The tokenizer of the built model: one token a character, made here so that a first run downloads nothing."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
import tokenizers.decoders
import tokenizers.models

SPECIALS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|unk|>")
"""Ids 0 to 6. `<|end|>` ends every message, and so a completion."""
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
"""Ids 7 to 102; any other character becomes `<|unk|>`."""
VOCAB_SIZE = 104
"""Length of the model's embedding: the 103 tokens and one spare row, a multiple of 8."""
END = "<|end|>"

_TEMPLATE = """\
{%- if tools %}{{- '<|system|>' + (tools | tojson) + '<|end|>' }}{%- endif %}
{%- for message in messages %}
{%- if message.role not in ('system', 'user', 'assistant', 'tool') %}{{- raise_exception('unknown role ' + message.role) }}{%- endif %}
{{- '<|' + message.role + '|>' + message.content + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""


def write_tokenizer(directory: Path) -> None:
    """Write a Hugging Face tokenizer directory (`AutoTokenizer` reads it too); the same bytes every time."""
    tokens = [*SPECIALS, *CHARACTERS]
    # Byte-pair encoding without a merge leaves single characters.
    model = tokenizers.models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[], unk_token="<|unk|>")
    backend = tokenizers.Tokenizer(model)
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    save_tokenizer(backend, directory)


def save_tokenizer(backend: tokenizers.Tokenizer, directory: Path) -> None:
    """Write `backend`, whose first ids are SPECIALS, as a Hugging Face tokenizer directory with the chat template of built models."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": "<|pad|>",
        "unk_token": "<|unk|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(backend.to_str(pretty=True) + "\n", encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (directory / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
