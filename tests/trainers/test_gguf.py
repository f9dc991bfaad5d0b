"""A GGUF file becomes a Hugging Face model directory with the weights, the tokens and the chat template that it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamrl.cli import main
from streamrl.config.check_files import check_files
from streamrl.config.tree import Config, ModelConfig
from streamrl.data.model import ensure_model
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError
from streamrl.trainers.gguf import write_from_gguf
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


def test_what_is_no_gguf_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(64))
    assert main(["convert", str(tmp_path / "bad.gguf"), str(tmp_path / "out")]) == 1
    assert "bad.gguf" in capsys.readouterr().err and not (tmp_path / "out").exists()
