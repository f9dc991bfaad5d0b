from __future__ import annotations

import filecmp
import json
from pathlib import Path
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.data.characters import CHARACTERS, SPECIALS, VOCAB_SIZE, write_tokenizer
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError
from tests.support.errors import raises

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]


def test_the_format_of_a_problem(tokenizer):
    text = tokenizer.apply_chat_template([{"role": "user", "content": "37+8="}])
    assert text == "<|user|>37+8=<|end|><|assistant|>"
    ids = tokenizer.encode(text)
    assert len(ids) == 8
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == "37+8="


def test_ids_fit_the_model(tokenizer):
    assert len(SPECIALS) + len(CHARACTERS) == tokenizer.vocab_size == 103 <= VOCAB_SIZE == 104
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.stop_ids) == (0, 5, (5,))


@given(text=st.text(alphabet=CHARACTERS, max_size=60))
def test_characters_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    if not any(special in text for special in SPECIALS):
        assert len(ids) == len(text)


def test_other_characters_are_unknown_and_many_are_encoded_as_one_by_one(tokenizer):
    assert tokenizer.encode("aä") == [tokenizer.encode("a")[0], SPECIALS.index("<|unk|>")]
    texts = ["1+1=", "<|user|>", "", "x y"]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.decode([*tokenizer.encode("a"), VOCAB_SIZE - 1]) == "a"


def test_the_files_are_the_same_every_time(characters, tmp_path):
    write_tokenizer(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert filecmp.cmpfiles(characters, tmp_path, names, shallow=False) == (names, [], [])


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


@pytest.mark.parametrize("messages", [[{"role": "robot", "content": "x"}], [{"role": "user"}], [{"role": "user", "content": None}]])
def test_the_template_refuses(tokenizer, messages):
    with raises(ConfigError, refused=ANY):
        tokenizer.apply_chat_template(messages)


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
    assert tokenizer.apply_chat_template(CHAT) == "Add.<|end|>"
    assert tokenizer.stop_ids == (5, 0)


def test_no_template(characters, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((characters / "tokenizer.json").read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    with raises(ConfigError, path=str(tmp_path), missing="chat_template"):
        tokenizer.apply_chat_template(CHAT)


def test_missing_or_broken_files(tmp_path):
    with raises(ConfigError, path=str(tmp_path), missing="tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with raises(ConfigError, path=str(tmp_path / "tokenizer.json")):
        load_tokenizer(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
    with raises(ConfigError, path=str(tmp_path), line=2):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with raises(ConfigError, path=str(tmp_path / "tokenizer_config.json")):
        load_tokenizer(tmp_path)


def test_what_templates_of_the_hub_use_besides(tmp_path: Path) -> None:
    """A tag for trainers of whole conversations, and the filter's options."""
    write_tokenizer(tmp_path)
    template = "{% generation %}{{ messages[0].content }}{% endgeneration %}{{ tools | tojson(ensure_ascii=False, separators=(',', ':')) }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    assert load_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "hi"}], tools={"a": "\u00e9"}) == 'hi{"a":"\u00e9"}'
