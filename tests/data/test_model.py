import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from streamrl.config.loss import ExpertsConfig, LossConfig
from streamrl.config.tree import Config, EngineConfig, ModelConfig, RunConfig, TrainerConfig
from streamrl.data.model import check_context, check_experts, check_positions, ensure_model
from streamrl.data.tokenizer import load_tokenizer
from streamrl.errors import ConfigError
from streamrl.schemas.tasks import Sampling
from tests.support.errors import raises

TINY = Config(model=ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, max_len=64))
TABLE = Config(engine=EngineConfig(kind="table"), trainer=TrainerConfig(backend="table"), sampling=Sampling(max_new_tokens=5))


def files(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_the_built_model_loads_and_fits_its_tokenizer(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    directory = ensure_model(TINY, tmp_path / "runs" / "model")
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    assert (model.config.model_type, model.config.eos_token_id) == ("qwen3", tokenizer.eos_id)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode("<|user|>1+1=<|end|>")])).logits
    assert logits.shape == (1, 6, 104)
    assert torch.isfinite(logits).all()
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_default_model_has_the_size_that_was_measured(tmp_path):
    from safetensors import safe_open

    directory = ensure_model(Config(), tmp_path / "model")
    with safe_open(directory / "model.safetensors", "np") as weights:
        total = sum(weights.get_tensor(name).size for name in weights.keys())  # noqa: SIM118
    assert total == 407_296


def test_weights_depend_on_the_seed_only(tmp_path):
    import torch

    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = files(ensure_model(TINY, tmp_path / "a"))
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(456)
    assert files(ensure_model(TINY, tmp_path / "b")) == first
    other = files(ensure_model(msgspec.structs.replace(TINY, run=RunConfig(seed=1)), tmp_path / "c"))
    assert {name for name in first if other[name] != first[name]} == {"model.safetensors"}


def test_a_model_is_built_once_and_a_given_one_is_used_where_it_is(tmp_path):
    directory = ensure_model(TABLE, tmp_path / "model")
    (directory / "mark").write_text("")
    assert ensure_model(TABLE, tmp_path / "model") == directory
    assert (directory / "mark").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert json.loads((directory / "table.json").read_text()) == {"vocab": 104, "max_position": 5, "eos": load_tokenizer(directory).eos_id}
    built = ensure_model(TABLE, tmp_path / "mine")
    config = msgspec.structs.replace(TABLE, model=ModelConfig(path=str(built)))
    assert ensure_model(config, tmp_path / "unused") == built
    assert not (tmp_path / "unused").exists()
    with raises(ConfigError, key="model.path", path=str(tmp_path)):
        ensure_model(Config(model=ModelConfig(path=str(tmp_path))), tmp_path / "unused")


def test_a_build_that_fails_leaves_nothing(tmp_path):
    broken = msgspec.structs.replace(TINY, model=ModelConfig(hidden=-1))
    with pytest.raises(RuntimeError, match="negative dimension"):
        ensure_model(broken, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("described", "positions"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"text_config": {"max_position_embeddings": 64}, "max_position_embeddings": 9}, 64),
        ({"max_position_embeddings": 32, "rope_scaling": {"type": "linear", "factor": 2.0}}, 64),
        ({"max_position_embeddings": 32, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 64),
        ({"max_position_embeddings": 64, "rope_scaling": None}, 64),
    ],
)
def test_a_length_beyond_the_models_positions_is_refused(tmp_path: Path, described: dict[str, object], positions: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    check_positions(Config(model=ModelConfig(max_len=positions)), tmp_path)
    with pytest.raises(ConfigError) as caught:
        check_positions(Config(model=ModelConfig(max_len=positions + 1)), tmp_path)
    assert (caught.value.values["key"], caught.value.values["positions"]) == ("model.max_len", positions)


def test_a_model_that_does_not_say_its_positions_passes(tmp_path: Path) -> None:
    check_positions(Config(), tmp_path)
    (tmp_path / "config.json").write_text("{}")
    check_positions(Config(), tmp_path)


@pytest.mark.parametrize("key", ["balance_coef", "z_coef"])
def test_losses_of_routers_are_for_mixtures_whose_routers_are_known(tmp_path: Path, key: str) -> None:
    config = Config(loss=LossConfig(experts=ExpertsConfig(**{key: 0.1})))
    for described in ({"model_type": "qwen3"}, {"model_type": "deepseek_v3"}, {"text_config": {"model_type": "llama"}}):
        (tmp_path / "config.json").write_text(json.dumps(described))
        with raises(ConfigError, key=f"loss.experts.{key}"):
            check_experts(config, tmp_path)
        check_experts(Config(), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    check_experts(config, tmp_path)


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"text_config": {"layer_types": ["linear_attention"]}}, "linear_attention"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ],
)
def test_ranks_share_no_rows_of_a_model_with_windows_or_caps(tmp_path: Path, described: dict[str, Any], says: str) -> None:
    config = Config(trainer=TrainerConfig(ranks=2, context=2))
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=f"needs layers that attend to all.* {says} in") as caught:
        check_context(config, tmp_path)
    assert caught.value.values["key"] == "trainer.context"
    check_context(Config(), tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps({"layer_types": ["full_attention"], "sliding_window": None, "use_sliding_window": False})
    )
    check_context(config, tmp_path)
