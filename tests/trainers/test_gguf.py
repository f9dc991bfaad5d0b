"""A GGUF file becomes a Hugging Face model directory with the weights, the tokens and the chat template that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from streamrl.cli import main
from streamrl.config.check_files import check_files
from streamrl.config.tree import Config, ModelConfig
from streamrl.data.model import ensure_model
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError
from streamrl.models.gguf import write_from_gguf
from tests.support.errors import raises

HEADS, HIDDEN = 2, 16
AFTER_BYTES = ["He", "<|im_start|>", "<|im_end|>"]
END = 258
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of a layer's tensors in transformers and in llama.cpp."""


def interleaved(weight: Any) -> Any:
    """Reorder the rows of queries and keys as llama.cpp has them: its rotation pairs neighbours, that of transformers pairs halves."""
    rows, columns = weight.shape
    return weight.reshape(HEADS, 2, rows // HEADS // 2, columns).swapaxes(1, 2).reshape(rows, columns)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
    }
    made = LlamaForCausalLM(LlamaConfig(vocab_size=256 + len(AFTER_BYTES), max_position_embeddings=64, tie_word_embeddings=True, **sizes))
    # What bfloat16 holds exactly, so that nothing is lost on the way.
    made.load_state_dict({name: tensor.bfloat16().float() for name, tensor in made.state_dict().items()})
    return made


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*bytes_to_unicode().values(), *AFTER_BYTES])
    writer.add_token_types([gguf.TokenType.NORMAL] * 257 + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["H e"])
    writer.add_bos_token_id(END - 1)
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", interleaved(weight) if theirs in ("attn_q", "attn_k") else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_tokens_and_template_are_those_of_the_file(model: Any, file: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    written = write_from_gguf(file, tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.tensor([[72, 101, 108, 108, 111, END]])
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert written.tensors == len(list(model.parameters())) and written.nbytes == 2 * sum(each.numel() for each in model.parameters())
    tokenizer = load_tokenizer(tmp_path / "model")
    assert tokenizer.eos_id == again.generation_config.eos_token_id == END
    assert tokenizer.decode(tokenizer.encode("Hello there")) == "Hello there"
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == TEMPLATE
    with raises(ConfigError, path=str(tmp_path / "model")):
        write_from_gguf(file, tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "check"), [("", lambda config, place: ensure_model(config, place)), ("some.gguf", lambda config, _: check_files(config))]
)
def test_a_gguf_file_as_a_model_is_refused_with_the_command_that_converts_it(tmp_path: Path, name: str, check: Any) -> None:
    file = tmp_path / "some.gguf"
    file.write_bytes(b"GGUF")
    with raises(ConfigError, key="model.path") as caught:
        check(Config(model=ModelConfig(path=str(tmp_path / name))), tmp_path / "built")
    assert f"streamrl convert {file} " in caught.value.hint


GEMMA_NAMES = NAMES | {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
GEMMA_TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", *"▁abcdefgh"]
GEMMA_TEMPLATE = "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['content'] }}<end_of_turn>{% endfor %}"


def write_gemma(path: Path, model: Any, *, template: str = GEMMA_TEMPLATE, layers: int = 6, factor: int = 0) -> None:
    """Write a Gemma 3 as llama.cpp has it, but for all layers behind the first `layers`."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    if factor:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(GEMMA_TOKENS)
    writer.add_token_scores([0.0] * len(GEMMA_TOKENS))
    writer.add_token_types([gguf.TokenType.CONTROL] * 6 + [gguf.TokenType.NORMAL] * (len(GEMMA_TOKENS) - 6))
    for add, number in (
        (writer.add_pad_token_id, 0),
        (writer.add_eos_token_id, 1),
        (writer.add_bos_token_id, 2),
        (writer.add_unk_token_id, 3),
    ):
        add(number)
    writer.add_add_space_prefix(False)
    if template:
        writer.add_chat_template(template)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"] + 1)
    for layer in range(layers):
        for ours, theirs in GEMMA_NAMES.items():
            weight = state[f"model.layers.{layer}.{ours}.weight"]
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", weight + 1 if "norm" in theirs else weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def gemma() -> Any:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(GEMMA_TOKENS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=64,
        sliding_window=8,
        initializer_range=0.3,
    )
    made = Gemma3ForCausalLM(config)
    # A norm's weight is one more in the file, so both have to be what bfloat16 holds.
    made.load_state_dict({name: (8 * tensor).round().bfloat16().float() / 8 for name, tensor in made.state_dict().items()})
    return made


@pytest.mark.parametrize(("template", "ends"), [(GEMMA_TEMPLATE, [1, 5]), ("", 1), ("{{ raise_exception('roles') }}", 1)])
def test_gemma_keeps_its_windows_and_ends_an_answer_as_its_template_does(gemma: Any, template: str, ends: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_gemma(tmp_path / "tiny.gguf", gemma, template=template)
    write_from_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ids = torch.arange(30)[None] % len(GEMMA_TOKENS)
    assert torch.allclose(again(ids).logits, gemma(ids).logits, atol=1e-5)
    for key in ("layer_types", "sliding_window", "rope_parameters"):
        assert getattr(again.config, key) == getattr(gemma.config, key)
    assert again.config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert again.generation_config.eos_token_id == ends
    tokenizer = load_tokenizer(tmp_path / "model")
    assert list(tokenizer.stop_ids) == (ends if isinstance(ends, list) else [ends])
    text = "<start_of_turn>ab cad<end_of_turn>"
    assert tokenizer.encode(text, add_special_tokens=True) == AutoTokenizer.from_pretrained(tmp_path / "model")(text).input_ids
    assert tokenizer.encode(text, add_special_tokens=True)[0] == 2


@pytest.mark.parametrize(("key", "options"), [("missing", {"layers": 4}), ("got", {"factor": 8})])
def test_a_file_that_is_not_read_whole_is_refused(gemma: Any, key: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Tensors of which there is a second file, and positions that are scaled, which transformers does not read."""
    write_gemma(tmp_path / "part.gguf", gemma, **options)
    with raises(ConfigError, **{"path": str(tmp_path / "part.gguf"), key: ANY}):
        write_from_gguf(tmp_path / "part.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_is_no_gguf_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(64))
    assert main(["convert", str(tmp_path / "bad.gguf"), str(tmp_path / "out")]) == 1
    assert "bad.gguf" in capsys.readouterr().err and not (tmp_path / "out").exists()
