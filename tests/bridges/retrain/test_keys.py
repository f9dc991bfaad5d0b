"""Hyperparameters against a table of what retrain's page and its slime adapter say of each, read back from the loaded configuration."""

import re
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from streamrl.bridges.retrain.keys import KNOWN, translate
from streamrl.bridges.retrain.placement import Asked, free_gpus, place
from streamrl.bridges.retrain.run_files import nested, toml
from streamrl.config.load import load
from streamrl.config.tree import Config
from streamrl.errors import ConfigError

NAMED = {  # every key that retrain's page names, with a value of its own, and where it has to arrive
    "slime_rollout_temperature": (0.8, "sampling.temperature", 0.8),
    "slime_rollout_top_p": (0.9, "sampling.top_p", 0.9),
    "slime_rollout_max_response_len": (512, "sampling.max_new_tokens", 512),
    "slime_bf16": (True, "model.dtype", "bfloat16"),
    "slime_gradient_checkpointing": (True, "trainer.activations", 0),
    "slime_sglang_server_concurrency": (256, "engine.slots", 256),
    "slime_save_interval": (7, "trainer.checkpoint_every", 7),
    "learning_rate": (3e-5, "trainer.optimizer.learning_rate", 3e-5),
    "num_iterations": (20, "run.steps", 20),
    "rollout_batch_size": (4, "tasks.batch_tasks", 4),
    "global_batch_size": (4, "trainer.minibatches", 2),  # 2 prompts * 4 samples / 4
}
MORE = {
    "streamrl_lr": ("1e-5", "trainer.optimizer.learning_rate", 1e-5),  # as PyYAML reads 1e-5
    "n_samples_per_prompt": (8, "tasks.num_rollouts", 8),
    "num_generations": (8, "tasks.num_rollouts", 8),
    "slime_lr_decay_style": ("WSD", "trainer.optimizer.schedule", "wsd"),
    "slime_lr_warmup_iters": (0, "trainer.optimizer.warmup_steps", 0),
    "slime_min_lr": (5e-6, "trainer.optimizer.final_fraction", 0.5),
    "slime_eps_clip": (0.1, "loss.clip_high", 0.1),
    "slime_eps_clip_high": (0.28, "loss.clip_high", 0.28),
    "slime_use_tis": (False, "loss.correction.kind", "none"),
    "slime_kl_loss_coef": (0.01, "loss.kl.loss_coef", 0.01),
    "slime_disable_grpo_std_normalization": (True, "loss.normalize_std", False),
    "slime_calculate_per_token_loss": (True, "loss.reduction", "token_mean"),
    "slime_normalize_advantages": (False, "loss.whiten", "off"),
    "slime_rollout_stop": (["</a>", '"'], "sampling.stop", ("</a>", '"')),
    "slime_sglang_mem_fraction_static": (0.7, "engine.sglang.flags", {"mem_fraction_static": 0.7}),
    "slime_max_tokens_per_gpu": (9216, "trainer.micro_tokens", 9216),
    "slime_use_wandb": (False, "metrics.sinks", ()),
    "slime_seed": (7, "run.seed", 7),
    "streamrl_loss.clip_low": (0.3, "loss.clip_low", 0.3),
}


def loaded(place: Path, hyperparameters: dict[str, Any], *, free: int = 2) -> Config:
    (place / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    tree = nested(translate(hyperparameters, free=free).keys | {"data.train": str(place / "rows.jsonl"), "data.label_key": "label"})
    (place / "run.toml").write_text(toml(tree))
    return load(place / "run.toml")


def at(config: Config, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


@pytest.mark.parametrize("name", [*NAMED, *MORE])
def test_a_hyperparameter_arrives_where_it_belongs(tmp_path: Path, name: str) -> None:
    value, key, expected = {**NAMED, **MORE}[name]
    got = at(loaded(tmp_path, {name: value}), key)
    assert got == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_prefixes_mean_the_same_and_streamrls_own_key_goes_before(tmp_path: Path) -> None:
    for name in ("lr", "learning_rate", "slime_lr", "slime_learning_rate", "streamrl_lr"):
        assert loaded(tmp_path, {name: 2e-4}).trainer.optimizer.learning_rate == 2e-4
    config = loaded(tmp_path, {"lr": 2e-4, "streamrl_trainer.optimizer.learning_rate": 3e-4})
    assert config.trainer.optimizer.learning_rate == 3e-4


def test_the_defaults_are_those_of_retrains_adapter(tmp_path: Path) -> None:
    config = loaded(tmp_path, {})
    # retrain/trainer/grpo/slime.py (511eb4a), its smart defaults
    assert (config.run.steps, config.run.seed, config.tasks.batch_tasks, config.tasks.num_rollouts) == (10, 42, 2, 4)
    assert 2 * 4 / config.trainer.minibatches == 8, "global_batch_size"
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.max_new_tokens) == (0.7, 0.9, 256)
    optimizer = config.trainer.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.schedule) == (1e-5, 0.01, "cosine")
    assert optimizer.warmup_steps == 0.1 * 10
    assert (config.loss.advantage, config.loss.clip_low, config.loss.clip_high, config.loss.whiten) == ("grpo", 0.2, 0.2, "on")
    assert (config.loss.kl.reward_coef, config.loss.kl.loss_coef, config.loss.entropy_coef) == (0, 0, 0)
    assert (config.trainer.checkpoint_every, config.model.dtype) == (5, "bfloat16")


def test_the_pages_advanced_configuration_is_a_run_of_two_nodes(tmp_path: Path) -> None:
    given = {"learning_rate": 1e-5, "rollout_batch_size": 4, "slime_actor_num_nodes": 2, "slime_actor_num_gpus_per_node": 4}
    given |= {"slime_rollout_num_gpus": 8, "slime_colocate": False, "slime_rollout_temperature": 0.8, "slime_bf16": True}
    given |= {"slime_use_retrain_environment": True, "slime_use_retrain_rewards": False}
    config = loaded(tmp_path, given, free=0)
    assert (config.trainer.ranks, config.engine.workers, config.ray.address, config.weights.transport) == (8, 8, "auto", "bus")
    said = translate(given, free=0)
    assert (said.use_environment, said.use_rewards) == (True, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"slime_learning_rat": 1}, "did you mean slime_learning_rate"),
        ({"nonsense_of_mine": 1}, "docs/retrain.md"),
        ({"sglang_mem_fraction_static": 0.7}, "expected a known hyperparameter"),
        ({"lr": 1e-4, "slime_lr": 2e-4}, "which are the same"),
        ({"lr": "fast"}, "lr to be a finite number, got 'fast'"),
        ({"lr": float("nan")}, "finite number"),
        ({"lr": True}, "finite number"),
        ({"num_iterations": 2.5}, "whole number of at least 1"),
        ({"num_iterations": 0}, "whole number of at least 1"),
        ({"slime_bf16": "yes"}, "true or false"),
        ({"global_batch_size": 3}, "to divide rollout_batch_size \\* n_samples_per_prompt = 8, got 3"),
        ({"slime_advantage_estimator": "gae"}, "one of grpo"),
        ({"slime_lr_decay_style": "step"}, "one of constant"),
        ({"slime_min_lr": 1.0}, "min_lr to be between 0 and lr"),
        ({"slime_loss_type": "sft_loss"}, "run.kind"),
        ({"slime_offload": True}, "neither leaves its memory"),
        ({"slime_sglang_dp_size": 2}, "several engines"),
        ({"slime_use_kl_loss": False, "slime_kl_loss_coef": 0.1}, "kl_loss_coef to be 0"),
        ({"slime_sequence_parallel": True}, "exactly where"),
        ({"slime_sglang_tp_size": 2, "slime_rollout_num_gpus_per_engine": 4}, "sglang_tp_size to be rollout_num_gpus_per_engine = 4"),
        ({"slime_actor_num_nodes": 2}, "the GPUs of other nodes are not known"),
        ({"slime_tensor_model_parallel_size": 4}, "expected 4 free GPUs for the trainer and 1 for an engine, 2 are free"),
        ({"streamrl_run.stepz": 3}, "did you mean run.steps"),
        ({"streamrl_run": 3}, "expected a known hyperparameter"),
        ({"streamrl_run.name.x": 3, "streamrl_run.name": "y"}, "to be a table"),
        ({"slime_rollout_stop": {1, 2}}, "a finite number, a text, a list or a table"),
        ({"slime_rollout_temperature": 0.0}, "temperature must be above 0"),
    ],
)
def test_what_has_no_meaning_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, given)
    assert re.search(said, str(caught.value))


def test_what_does_nothing_is_said() -> None:
    said = translate({"slime_micro_batch_size": 1, "logging_steps": 1}, free=2).notes
    assert [note.split(":")[0] for note in said] == ["micro_batch_size does nothing", "logging_steps does nothing", "GPUs"]
    assert len(set(KNOWN)) == len(KNOWN)


SHAPES = [  # free GPUs, what is asked for -> trainer's GPUs, engines, GPUs of an engine
    (2, {}, (1, 1, 1)),
    (3, {}, (2, 1, 1)),
    (8, {}, (4, 4, 1)),
    (8, {"trainer": 2, "rollout": 6}, (2, 6, 1)),
    (8, {"per_engine": 4}, (4, 1, 4)),
    (8, {"trainer": 8, "rollout": 8, "nodes": 1}, (4, 4, 1)),
    (4, {"trainer": 2, "rollout": 2, "colocate": True}, (2, 2, 1)),
    (2, {"trainer": 2, "rollout": 2, "colocate": True}, (1, 1, 1)),
    (2, {"trainer": 8, "rollout": 4}, (1, 1, 1)),
    (6, {"tensor": 2, "pipeline": 2}, (4, 2, 1)),
    (5, {"rollout": 4, "per_engine": 2}, (1, 2, 2)),
    (3, {"per_engine": 2}, (1, 1, 2)),
]


@pytest.mark.parametrize(("free", "asked", "expected"), SHAPES)
def test_trainer_and_engines_share_what_is_free(tmp_path: Path, free: int, asked: dict[str, Any], expected: tuple[int, int, int]) -> None:
    placed = place(free, Asked(**asked))
    keys = placed.keys
    shape = keys["trainer.ranks"], keys["engine.workers"], keys["engine.sglang.tensor_parallel"]
    assert shape == expected
    trainer, engines = keys["trainer.ranks"], keys["engine.sglang.gpus"]
    assert sorted([*range(trainer), *engines]) == list(range(trainer + len(engines))) and trainer + len(engines) <= free
    wanted = asked.get("trainer", 0) + asked.get("rollout", 0)
    assert any("are asked for" in note for note in placed.notes) == (wanted > free), "a smaller configuration is said"
    if asked.get("tensor", 1) == 1:
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "2"}\n')
        (tmp_path / "run.toml").write_text(toml(nested(keys | {"data.train": str(tmp_path / "rows.jsonl"), "model.dtype": "bfloat16"})))
        assert load(tmp_path / "run.toml").trainer.shards == trainer, "a large model is cut over the trainer's GPUs"


def test_whatever_is_asked_for_fits_or_is_refused() -> None:
    sizes = (None, 1, 2, 5, 8)
    for free, per_engine, tensor, trainer, rollout in product(range(2, 9), (1, 2, 4), (1, 2), sizes, sizes):
        asked = Asked(trainer=trainer, rollout=rollout, per_engine=per_engine, tensor=tensor)
        if free < tensor + per_engine:
            with pytest.raises(ConfigError, match="are free"):
                place(free, asked)
            continue
        keys = place(free, asked).keys
        engines, ranks = keys["engine.sglang.gpus"], keys["trainer.ranks"]
        assert len(engines) == keys["engine.workers"] * per_engine and ranks % tensor == 0 and min(engines) == ranks and max(engines) < free


def test_one_gpu_is_shared_and_none_is_the_cpu(tmp_path: Path) -> None:
    config = loaded(tmp_path, {"slime_sglang_mem_fraction_static": 0.5}, free=1)
    assert config.engine.sglang.gpus == (0,) and config.engine.sglang.flags == {"mem_fraction_static": 0.5}
    config = loaded(tmp_path, {"slime_sglang_mem_fraction_static": 0.5}, free=0)
    assert (config.engine.kind, config.trainer.device, config.model.dtype) == ("local", "cpu", "float32")


def smi(place: Path, text: str, code: int = 0) -> dict[str, str]:
    (place / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{text}'\nexit {code}\n")
    (place / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{place}:/bin:/usr/bin"}


@pytest.mark.process
def test_gpus_of_others_are_left_alone(tmp_path: Path) -> None:
    given = smi(tmp_path, "0, 70000, 80000\\n1, 3, 80000\\n2, 500, 80000\\n3, 9000, 80000\\n")
    assert free_gpus(given) == ["1", "2"]
    assert free_gpus({**given, "CUDA_VISIBLE_DEVICES": "2, 0"}) == ["2"]
    assert free_gpus({**given, "CUDA_VISIBLE_DEVICES": ""}) == []
    assert free_gpus({**given, "CUDA_VISIBLE_DEVICES": "-1"}) == free_gpus({**given, "CUDA_VISIBLE_DEVICES": "NoDevFiles"}) == []
    assert free_gpus({**given, "CUDA_VISIBLE_DEVICES": "GPU-8932f937,1,9,2"}) == ["GPU-8932f937", "1"]
    assert free_gpus({"PATH": str(tmp_path / "nowhere")}) == []
    for text, code in (("no devices", 9), ("what, is, this\\n", 0)):
        with pytest.raises(ConfigError, match="which GPUs are free"):
            free_gpus(smi(tmp_path, text, code))
