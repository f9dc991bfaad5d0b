"""Tokenizers of built models: of characters, and of byte pairs."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest
import tokenizers

from streamrl.config.check import check
from streamrl.config.data import SourceConfig
from streamrl.config.tree import Config, DataConfig, ModelConfig
from streamrl.data.byte_pairs import training_texts, write_byte_pairs
from streamrl.data.characters import CHARACTERS, SPECIALS, VOCAB_SIZE, write_tokenizer
from streamrl.data.model import ensure_model
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.data.vocabulary import vocab_size
from streamrl.errors import ConfigError
from tests.support.errors import raises

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def test_the_format_of_a_problem_and_its_ids_fit_the_model(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "37+8="}])
    assert text == "<|user|>37+8=<|end|><|assistant|>"
    ids = tokenizer.encode(text)
    assert len(ids) == 8
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special_tokens=True)) == (text, "37+8=")
    assert len(SPECIALS) + len(CHARACTERS) == tokenizer.vocab_size == 103 <= VOCAB_SIZE == 104
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 5, (5,))


def test_other_characters_are_unknown_and_many_are_encoded_as_one_by_one(tokenizer):
    assert tokenizer.encode("aä") == [tokenizer.encode("a")[0], SPECIALS.index("<|unk|>")]
    texts = ["1+1=", "<|user|>", "", "x y"]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode([*tokenizer.encode("a"), VOCAB_SIZE - 1]) == "a"


@pytest.mark.parametrize("tools", [None, [{"name": "add", "parameters": {"a": "<ü>"}}]])
@pytest.mark.parametrize("prompt", [True, False])
def test_equal_to_transformers(characters, tokenizer, tools, prompt):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(characters)
    text = reference.apply_chat_template(CHAT, tools=tools, tokenize=False, add_generation_prompt=prompt)
    assert tokenizer.apply_chat_template(CHAT, tools=tools, add_generation_prompt=prompt) == text
    assert reference(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert reference.decode(tokenizer.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert (reference.eos_token_id, reference.pad_token_id) == (tokenizer.eos_id, tokenizer.pad_id)


def test_the_template_refuses(tokenizer):
    with raises(ConfigError, refused=ANY):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])


def test_other_layouts_of_a_directory(characters, tmp_path):
    """The template inside the settings, tokens as tables, several stop ids."""
    settings = json.loads((characters / "tokenizer_config.json").read_text())
    settings["eos_token"] = {"content": "<|end|>", "lstrip": False}
    settings["chat_template"] = [
        {"name": "rag", "template": "no"},
        {"name": "default", "template": "{{ messages[0].content }}{{ eos_token }}"},
    ]
    (tmp_path / "tokenizer.json").write_bytes((characters / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 0]}')
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.apply_chat_template(CHAT), tokenizer.stop_ids) == ("Add.<|end|>", (5, 0))


def test_missing_or_broken_files(characters, tmp_path):
    with raises(ConfigError, path=str(tmp_path), missing="tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises(ConfigError, path=str(tmp_path / "tokenizer.json")):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((characters / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    with raises(ConfigError, path=str(tmp_path), missing="chat_template"):
        tokenizer.apply_chat_template(CHAT)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with raises(ConfigError, path=str(tmp_path), line=2):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(ConfigError, path=str(tmp_path / "tokenizer_config.json")):
        load_tokenizer(tmp_path)


def test_a_model_without_a_token_that_ends_an_answer_is_refused(characters: Path, tmp_path: Path) -> None:
    for file in characters.iterdir():
        settings = json.loads(file.read_text()) if file.name in ("tokenizer_config.json", "generation_config.json") else None
        text = json.dumps({key: value for key, value in settings.items() if "eos" not in key}) if settings else file.read_text()
        (tmp_path / file.name).write_text(text)
    assert load_tokenizer(characters).end_id == 5
    with raises(ConfigError, missing="eos_token", path=str(tmp_path)):
        load_tokenizer(tmp_path).check_end()


@pytest.mark.parametrize(
    ("model", "added", "kind", "fits"),
    [
        (0, 0, "plain", True),
        (20, 0, "plain", True),
        (-1, 0, "plain", False),
        (2, 2, "plain", True),
        (1, 2, "plain", False),
        (0, 2, "special", True),
        (0, 2, "end", False),
    ],
)
def test_a_model_with_fewer_ids_than_its_tokenizer_is_refused(
    characters: Path, tmp_path: Path, model: int, added: int, kind: str, fits: bool
) -> None:
    """`model`: its ids beyond those of the tokenizer, to which tokens are `added`; special ones that end no answer may lie beyond."""
    backend = tokenizers.Tokenizer.from_file(str(characters / "tokenizer.json"))
    size = backend.get_vocab_size() + model
    (backend.add_tokens if kind == "plain" else backend.add_special_tokens)([f"<more{n}>" for n in range(added)])
    backend.save(str(tmp_path / "tokenizer.json"))
    if kind == "end":
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": size}))
    tokenizer = load_tokenizer(tmp_path)
    if fits:
        tokenizer.check_model(size)
        return
    with raises(ConfigError, path=str(tmp_path), vocab_size=size, got=size):
        tokenizer.check_model(size)


def test_what_templates_of_the_hub_use_besides(tmp_path: Path) -> None:
    """A tag for trainers of whole conversations, and the filter's options."""
    write_tokenizer(tmp_path)
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools | tojson(ensure_ascii=False, separators=(',', ':')) }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert (
        load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}], tools=[{"a": "\u00e9"}]) == 'hi[{"a":"\u00e9"}]'
    )


TEXTS = [f"Natalia sold {n} clips in April and {2 * n} clips in May. How many clips did she sell?" for n in range(40)]
TRAIN = """
import sys
from pathlib import Path
from streamrl.data.byte_pairs import write_byte_pairs
write_byte_pairs(Path(sys.argv[1]), [f"the {n}th of {3 * n} apples, and {7 - n} pears" for n in range(500)], vocab_size=400)
"""


@pytest.fixture
def pairs(tmp_path: Path) -> Tokenizer:
    write_byte_pairs(tmp_path, TEXTS, vocab_size=320)
    return load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", [TEXTS[7], "", " \n\t ", "price: $1,234.50!", "Zoë: 3 jalapeños → 😀", "\x00\x7f"])
def test_every_text_comes_back(pairs: Tokenizer, text: str) -> None:
    assert pairs.decode(pairs.encode(text)) == text


def test_tokens_are_fewer_than_characters_and_no_more_than_the_texts_give(pairs: Tokenizer, tmp_path: Path) -> None:
    ids = pairs.encode(TEXTS[7])
    assert len(ids) < len(TEXTS[7]) / 2
    assert len(pairs.encode("12345")) == 5
    assert sum(text.strip().isdigit() for text in (pairs.decode([i]) for i in pairs.encode("sold 14 clips"))) == 2
    assert write_byte_pairs(tmp_path, ["aa", "aa"], vocab_size=1000) < 300


def test_byte_pairs_are_written_as_built_models_write_them(pairs: Tokenizer, tmp_path: Path) -> None:
    text = pairs.apply_chat_template([{"role": "user", "content": "How many?"}])
    assert text == "<|user|>How many?<|end|><|assistant|>"
    ids = pairs.encode(text)
    assert [ids[0], ids[-2], ids[-1]] == [SPECIALS.index(name) for name in ("<|user|>", "<|end|>", "<|assistant|>")]
    assert pairs.eos_id == SPECIALS.index("<|end|>")
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXTS[3], "<|user|>Zoë 12<|end|>"):
        assert theirs.encode(text, add_special_tokens=False) == pairs.encode(text)


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
