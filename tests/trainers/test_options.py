"""Choices that decide where and how a trainer computes: type, device, attention, activation checkpointing; and the numerics fingerprint."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from streamrl.config.tree import Config, ModelConfig, TrainerConfig
from streamrl.errors import ConfigError
from streamrl.schemas.ledger import Choices
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.fingerprint import fingerprint_difference, fingerprint_digest, numerics_fingerprint
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from tests.support import trainers
from tests.support.errors import raises
from tests.support.scoring import body_of
from tests.support.trainers import Rollouts

make = partial(trainers.make, rate=1e-5, device="cpu")


def test_bfloat16_parameters_have_float32_masters(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    trainer = make(model_dir, dtype="bfloat16")
    for step in range(3):
        trainer.step(rollouts(step))
    assert {shard.dtype for shard in trainer.shards()} == {"bfloat16"}
    trainer.save(tmp_path / "at", b"", version=Version(0, 3)).result()
    parameters, optimizer = load_file(tmp_path / "at" / "model.safetensors"), load_file(tmp_path / "at" / "optimizer.safetensors")
    for name, parameter in parameters.items():
        assert optimizer[f"{name}.exp_avg"].dtype == optimizer[f"{name}.exp_avg_sq"].dtype == torch.float32
        assert torch.equal(optimizer[f"{name}.master"].bfloat16(), parameter)
    # Steps of 1e-5 are below the rounding of most bfloat16 values: only the masters hold them.
    assert any(not torch.equal(optimizer[f"{name}.master"], parameter.float()) for name, parameter in parameters.items())
    resumed = make(model_dir, dtype="bfloat16")
    resumed.load(tmp_path / "at")
    assert [resumed.step(rollouts(s)) for s in range(3, 6)] == [trainer.step(rollouts(s)) for s in range(3, 6)]


def test_the_trainers_type_wins_over_the_models(model_dir: Path) -> None:
    models = Config(model=ModelConfig(dtype="bfloat16"), trainer=TrainerConfig(device="cpu"))
    fingerprint = numerics_fingerprint(replace(models, trainer=replace(models.trainer, dtype="float32")))
    assert (fingerprint["dtype"], fingerprint["device"]) == ("float32", "cpu")
    assert {shard.dtype for shard in make_trainer(models, model_dir).shards()} == {"bfloat16"}


@pytest.mark.parametrize("kept", ["all", 0, 1, 2])
def test_layers_that_keep_nothing_are_run_again_the_first_and_no_bit_changes(model_dir: Path, rollouts: Rollouts, kept: Any) -> None:
    plain, trainer, seen = make(model_dir), make(model_dir, activations=kept), [0, 0]

    def count(number: int) -> None:
        seen[number] += 1

    for number, layer in enumerate(body_of(trainer).layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: count(number))
    for step in range(2):
        ours, theirs = trainer.step(rollouts(step)), plain.step(rollouts(step))
        assert (ours.choices, theirs.choices) == (None if kept in ("all", 2) else Choices(kept_layers=kept), None)
        assert replace(ours, choices=None) == theirs
    once = 2 if kept == "all" else int(kept)
    assert seen == [4] * (2 - once) + [2] * once


def test_a_number_that_is_configured_stands_above_what_was_recorded(model_dir: Path, rollouts: Rollouts) -> None:
    found = make(model_dir, activations=1).step(replace(rollouts(), choices=Choices(kept_layers=0))).choices
    assert found is not None and found.kept_layers == 1


def test_what_is_not_there_is_refused(model_dir: Path) -> None:
    with raises(ConfigError, key="trainer.activations", got=3) as caught:
        make(model_dir, activations=3)
    assert "has 2 layers" in str(caught.value)
    with raises(ConfigError, key="trainer.attention", got="flash") as caught:
        CausalLM(model_dir, torch.float32, torch.device("cpu"), kernels=Kernels(attention="flash"))
    assert "sdpa" in caught.value.hint
    missing = torch.cuda.device_count() + 3
    with raises(ConfigError, key="trainer.gpu", gpu=missing, gpus=missing - 3):
        make(model_dir, device="cuda", gpu=missing)


def test_the_digest_depends_on_whatever_changes_digits() -> None:
    assert fingerprint_digest({"a": "1", "b": "2"}) == fingerprint_digest({"b": "2", "a": "1"})
    assert fingerprint_digest({"a": "1", "b": "2"}) != fingerprint_digest({"a": "2", "b": "1"})
    config = Config()
    base = numerics_fingerprint(config)
    assert {"torch", "device", "capability", "threads", "mkldnn", "numpy", "processor", "dtype"} <= set(base)
    other = msgspec.structs.replace(config, trainer=TrainerConfig(minibatches=2, micro_tokens=64))
    difference = fingerprint_difference(numerics_fingerprint(other), base)
    assert difference == ["micro_tokens: 64 here, 16384 there", "minibatches: 2 here, 1 there"]
    assert numerics_fingerprint(config) == base


@pytest.mark.process
def test_the_table_backend_imports_no_torch(table_dir: Path) -> None:
    code = """
import sys
from pathlib import Path
from streamrl.config.tree import Config, TrainerConfig
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
config = Config(trainer=TrainerConfig(backend="table"))
make_trainer(config, Path(sys.argv[1]))
assert len(fingerprint_digest(numerics_fingerprint(config))) == 16
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(table_dir)], check=True)
