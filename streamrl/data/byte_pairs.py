"""The tokenizer of a built model that reads text: byte-pair encoding, trained here on the run's own rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.trainers

from streamrl.config.data import DataConfig, data_sets
from streamrl.data.characters import SPECIALS, save_tokenizer
from streamrl.data.rows import open_rows


def write_byte_pairs(directory: Path, texts: Iterable[str], *, vocab_size: int) -> int:
    """Train on `texts` and write a tokenizer directory; the same texts give the same bytes.

    Every text can be encoded (the 256 bytes are tokens) and comes back as it was. A digit is always a token of its own, so that a number
    is written in one way only. Ids 0 to 6 are the special tokens of `streamrl.data.characters`.

    Args:
        directory: made if it is not there.
        texts: what is to be encoded well.
        vocab_size: most tokens, special ones included; fewer when the texts do not hold as many pairs.

    Returns:
        The number of tokens.
    """
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    bytes_of = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits: Any = tokenizers.pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, bytes_of])
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[tokenizers.AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )
    backend.train_from_iterator(texts, trainer)
    save_tokenizer(backend, directory)
    return backend.get_vocab_size(with_added_tokens=True)


def training_texts(config: DataConfig) -> Iterator[str]:
    """Prompts and labels of the training rows, or their conversations, in file order; of chat messages the contents.

    Raises DataError as `open_rows` does.
    """
    for _, one in data_sets(config):
        for row in open_rows(one.train):
            said = row.get(one.messages_key or one.prompt_key)
            parts: list[Any] = (
                [message.get("content") for message in said if isinstance(message, dict)] if isinstance(said, list) else [said]
            )
            label = None if one.messages_key else row.get(one.label_key)
            yield from (part for part in [*parts, label] if isinstance(part, str) and part)
