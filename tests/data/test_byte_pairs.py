from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from streamrl.config.check import check
from streamrl.config.sources import SourceConfig
from streamrl.config.tree import Config, DataConfig, ModelConfig
from streamrl.data.byte_pairs import training_texts, write_byte_pairs
from streamrl.data.characters import SPECIALS
from streamrl.data.model import ensure_model
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import ConfigError
from tests.support.errors import raises

TEXTS = [f"Natalia sold {n} clips in April and {2 * n} clips in May. How many clips did she sell?" for n in range(40)]
TRAIN = """
import sys
from pathlib import Path
from streamrl.data.byte_pairs import write_byte_pairs
write_byte_pairs(Path(sys.argv[1]), [f"the {n}th of {3 * n} apples, and {7 - n} pears" for n in range(500)], vocab_size=400)
"""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    write_byte_pairs(tmp_path, TEXTS, vocab_size=320)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", [TEXTS[7], "", " \n\t ", "price: $1,234.50!", "Zoë: 3 jalapeños → 😀", "\x00\x7f"])
def test_every_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokens_are_fewer_than_characters_and_no_more_than_the_texts_give(tokenizer: Tokenizer, tmp_path: Path) -> None:
    ids = tokenizer.encode(TEXTS[7])
    assert len(ids) < len(TEXTS[7]) / 2
    assert len(tokenizer.encode("12345")) == 5
    assert sum(text.strip().isdigit() for text in (tokenizer.decode([i]) for i in tokenizer.encode("sold 14 clips"))) == 2
    assert write_byte_pairs(tmp_path, ["aa", "aa"], vocab_size=1000) < 300


def test_special_tokens_and_the_template_are_those_of_built_models(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "How many?"}])
    assert text == "<|user|>How many?<|end|><|assistant|>"
    ids = tokenizer.encode(text)
    assert [ids[0], ids[-2], ids[-1]] == [SPECIALS.index(name) for name in ("<|user|>", "<|end|>", "<|assistant|>")]
    assert tokenizer.eos_id == SPECIALS.index("<|end|>")


def test_transformers_reads_it_alike(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXTS[3], "<|user|>Zoë 12<|end|>"):
        assert theirs.encode(text, add_special_tokens=False) == tokenizer.encode(text)


@pytest.mark.process
def test_the_bytes_depend_on_the_texts_only(tmp_path: Path) -> None:
    """Also over processes: hash tables are seeded anew in each, and threads are counted differently."""
    found: set[str] = set()
    for threads in ("1", "4"):
        directory = tmp_path / threads
        environment = {"RAYON_NUM_THREADS": threads, "PYTHONPATH": ":".join(sys.path), "PATH": ""}
        subprocess.run([sys.executable, "-c", TRAIN, str(directory)], check=True, env=environment)
        found.add(hashlib.sha256((directory / "tokenizer.json").read_bytes()).hexdigest())
    assert len(found) == 1


def test_texts_are_those_of_the_used_rows_and_of_conversations(tmp_path: Path) -> None:
    rows = [{"q": "one", "a": "1"}, {"q": [{"role": "user", "content": "two"}], "a": 2}, {"q": "three", "a": "3"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert list(training_texts(DataConfig(train=f"{path}@[0:2]", prompt_key="q", label_key="a"))) == ["one", "1", "two"]
    path = tmp_path / "chats.jsonl"
    path.write_text('{"chat": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}], "q": "two", "a": "2"}\n')
    data = DataConfig(
        messages_key="chat",
        prompt_key="q",
        label_key="a",
        sources=(SourceConfig(name="chats", train=str(path)), SourceConfig(name="plain", train=str(path), messages_key="")),
    )
    assert list(training_texts(data)) == ["one", "1", "two", "2"]


def test_the_built_model_has_the_rows_that_were_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "label": "yes"}) + "\n" for text in TEXTS))
    model = ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, vocab_size=320)
    directory = ensure_model(Config(model=model, data=DataConfig(train=str(path))), tmp_path / "model")
    assert vocab_size(directory) == 320
    assert load_tokenizer(directory).vocab_size <= 320


@pytest.mark.parametrize("size", [100, -1])
def test_too_few_tokens_are_refused(size: int) -> None:
    with raises(ConfigError, key="model.vocab_size"):
        check(Config(data=DataConfig(train="x.jsonl"), model=ModelConfig(vocab_size=size)))
