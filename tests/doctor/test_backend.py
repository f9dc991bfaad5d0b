"""What megatron-core cannot train here is refused by each verb before anything is started."""

import json
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.cli import main
from streamrl.config.loss import CriticConfig, DistillationConfig, LossConfig
from streamrl.config.ray import RayConfig
from streamrl.config.tree import Config, TrainerConfig
from streamrl.doctor.backend import check_backend, refuse_backend
from streamrl.errors import ConfigError
from streamrl.trainers.megatron import buildable
from tests.support.plans import MODELS

ROOT = Path(__file__).parents[2]
QWEN3 = MODELS["Qwen3-4B"] | {"vocab_size": 151_937}
Refused = Callable[..., list[str]]
pytestmark = pytest.mark.process  # `doctor` asks programs for their versions


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """`refused(*overrides)`: what `up`, `config` and `doctor` say, each of which ends with 1 and leaves nothing behind."""
    shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "quickstart")
    monkeypatch.chdir(tmp_path)

    def said(*overrides: str) -> list[str]:
        words = ["quickstart/quickstart.toml", "--set", "trainer.backend=megatron", *(word for one in overrides for word in ("--set", one))]
        found = []
        for verb in ("up", "config"):
            assert main([verb, *words]) == 1
            out, err = capsys.readouterr()
            assert verb == "up" or not out
            found.append(err)
        assert main(["doctor", *words, "--json"]) == 1
        (check,) = [one for one in json.loads(capsys.readouterr().out) if one["name"] == "backend"]
        assert check["state"] == "fail"
        assert not list((tmp_path / "runs").glob("*"))
        return [*found, f"{check['found']}\nhint: {check['hint']}"]

    return said


def described(place: Path, **changes: Any) -> str:
    """An override that names a model of these sizes, of which there are no weights."""
    (place / "config.json").write_text(json.dumps({**QWEN3, **changes}))
    return f"model.path={place}"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt2"}, "expected model_type one of llama, qwen2, qwen3, qwen3_moe, got 'gpt2'"),
        ({"hidden_act": "gelu"}, "expected hidden_act 'silu', got 'gelu'"),
        ({"num_attention_heads": None}, "expected num_attention_heads a whole number above 0, got None"),
        ({"use_sliding_window": True}, "got use_sliding_window = true"),
        ({"model_type": "qwen3_moe", "num_experts": 4}, "expected moe_intermediate_size a whole number above 0, got None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rotary embeddings of type default, linear, llama3, got yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "got dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "got one for each kind of layer"),
    ],
)
def test_a_model_that_is_not_built_is_refused_by_each_verb(
    refused: Refused, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    for said in refused(described(tmp_path, **changes)):
        assert expected in said and "hint: " in said and str(tmp_path / "config.json") in said


def test_descriptions_and_meshes_that_do_not_fit_are_refused_by_every_verb(refused: Refused, tmp_path: Path) -> None:
    for text in ("[]", "{", "null"):
        (tmp_path / "config.json").write_text(text)
        for said in refused(f"model.path={tmp_path}"):
            assert "model.path" in said
    for said in refused("trainer.ranks=4", "trainer.tensor=4"):
        assert "num_key_value_heads = 2, got 2 / 4" in said


def test_a_megatron_out_of_range_or_not_there_is_refused_by_each(refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is only described, so that no doctor builds one."""
    model = described(tmp_path)
    for number in ("0.15.3", "0.20.0"):
        place = tmp_path / number / f"megatron_core-{number}.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: megatron-core\nVersion: {number}\n")
        with monkeypatch.context() as patched:
            patched.syspath_prepend(place.parent)
            for said in refused(model):
                assert f"needs megatron-core >= 0.16 and < 0.20, got {number}" in said and "pip install 'streamrl[megatron]'" in said

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(buildable, "version", missing)
        for said in refused(model):
            assert "megatron-core" in said and "pip install 'streamrl[megatron]'" in said
    monkeypatch.setattr(buildable, "find_spec", lambda _: None)
    for said in refused(model):
        assert "einops and psutil" in said and "pip install 'streamrl[megatron]'" in said


@pytest.mark.parametrize(
    ("ranks", "sizes", "expected"),
    [
        (3, {}, "expected a divisor of num_attention_heads = 32, got 32 / 3 = 10.6667"),
        (16, {}, "expected a divisor of num_key_value_heads = 8, got 8 / 16 = 0.5"),
        (4, {"intermediate_size": 9726}, "expected a divisor of intermediate_size = 9726, got 9726 / 4 = 2431.5"),
        (4, {"vocab_size": 5}, "a vocabulary of 5 leaves the last rank without a row"),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_is_told_arithmetic(tmp_path: Path, ranks: int, sizes: dict[str, Any], expected: str) -> None:
    described(tmp_path, **sizes)
    config = Config(trainer=TrainerConfig(backend="megatron", ranks=ranks, tensor=ranks))
    check = check_backend(replace(config, model=replace(config.model, path=str(tmp_path))))
    assert check is not None and check.state == "fail" and expected in check.found and check.hint


def test_the_share_of_a_rank_a_stage_or_experts_is_told(tmp_path: Path) -> None:
    assert check_backend(Config()) is None
    described(tmp_path)
    config = Config(trainer=TrainerConfig(backend="megatron", ranks=4, tensor=4))
    said = refuse_backend(replace(config, model=replace(config.model, path=str(tmp_path))))
    for words in ("36 layers", "32 / 4 = 8 heads", "8 / 4 = 2 of keys", "9728 / 4 = 2432 of", "37985 rows of the vocabulary of 151937"):
        assert words in said
    # Of the model that is built: 4 heads and 2 of keys and values.
    with pytest.raises(ConfigError, match=r"the model that \[model\] builds|num_key_value_heads = 2, got 2 / 4"):
        refuse_backend(config)
    described(tmp_path, num_hidden_layers=6)
    config = Config(trainer=TrainerConfig(backend="megatron", ranks=3, pipeline=3))
    config = replace(config, model=replace(config.model, path=str(tmp_path)))
    assert "6 / 3 = 2" in refuse_backend(config)
    with pytest.raises(ConfigError, match=r"num_hidden_layers = 6, got 6 / 4 = 1\.5"):
        refuse_backend(replace(config, trainer=TrainerConfig(backend="megatron", ranks=4, pipeline=4)))
    described(tmp_path, model_type="qwen3_moe", num_hidden_layers=6, num_experts=6, moe_intermediate_size=768)
    with pytest.raises(ConfigError, match=r"trainer\.pipeline = 3 cuts no mixture"):
        refuse_backend(config)
    described(tmp_path, model_type="qwen3_moe", num_experts=6, moe_intermediate_size=768)
    config = Config(trainer=TrainerConfig(backend="megatron", ranks=6, experts=3))
    assert "6 / 3 = 2 of a layer's experts" in refuse_backend(replace(config, model=replace(config.model, path=str(tmp_path))))
    four = TrainerConfig(backend="megatron", ranks=4)
    for trainer, words in (
        (replace(four, experts=4), "num_experts = 6, got 6 / 4"),
        (replace(four, tensor=2), "trainer.tensor = 2 cuts no mixture"),
    ):
        other = Config(trainer=trainer)
        with pytest.raises(ConfigError, match=words):
            refuse_backend(replace(other, model=replace(other.model, path=str(tmp_path))))
    described(tmp_path)
    with pytest.raises(ConfigError, match="dense"):
        refuse_backend(replace(config, model=replace(config.model, path=str(tmp_path))))


@pytest.mark.parametrize("key", ["loss.distillation.teacher", "loss.critic.path"])
def test_another_model_that_cannot_be_built_is_refused_by_its_key(tmp_path: Path, key: str) -> None:
    described(tmp_path)
    (tmp_path / "other").mkdir()
    described(tmp_path / "other", num_hidden_layers=5)
    path = str(tmp_path / "other")
    teacher = LossConfig(distillation=DistillationConfig(coef=0.1, teacher=path))
    loss = LossConfig(advantage="ppo", critic=CriticConfig(path=path)) if key == "loss.critic.path" else teacher
    config = Config(trainer=TrainerConfig(backend="megatron", ranks=2, pipeline=2), loss=loss)
    with pytest.raises(ConfigError, match=r"num_hidden_layers = 5, got 5 / 2 = 2\.5") as caught:
        refuse_backend(replace(config, model=replace(config.model, path=str(tmp_path))))
    assert caught.value.values["key"] == key


def test_what_a_cluster_of_ray_has_installed_is_not_looked_at_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(buildable, "version", missing)
    config = Config(trainer=TrainerConfig(backend="megatron"))
    with pytest.raises(ConfigError, match="not installed"):
        refuse_backend(config)
    assert "of Ray's nodes" in refuse_backend(replace(config, ray=RayConfig(address="auto")))
