"""Tiny models and batches for trainer tests."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamrl.core.batches import TrainBatch
from streamrl.trainers.ranks import local
from tests.support import trainers
from tests.support.batches import train_batch
from tests.support.preloaded import Preloaded
from tests.support.trainers import Models, Rollouts

VOCAB = 16


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of `open_trainer` do not import what they need, except on GPUs and where a test has the fixture `real_ranks`."""
    if request.node.get_closest_marker("gpu") is None and "real_ranks" not in request.fixturenames:
        preloaded: Preloaded = request.getfixturevalue("preloaded")  # which tests on a GPU host do without, see scripts/gpu/tests.sh
        monkeypatch.setattr(local, "_spawn", preloaded.start_rank)


@pytest.fixture(scope="session")
def make_batch() -> Rollouts:
    return partial(train_batch, mu=-2.0, reward=np.nan)


@pytest.fixture(scope="session")
def rollouts(make_batch: Rollouts) -> Rollouts:
    """`rollouts(step)`: an RL batch of 4 groups of 3 with prompts of different lengths, rewards and sampler log-probs."""

    def make(stage_step: int = 0, **same: Any) -> TrainBatch:
        rng = np.random.default_rng(stage_step)
        samples: list[dict[str, Any]] = []
        for task in range(4):
            prompt = rng.integers(2, VOCAB, task + 2).tolist()
            for rollout in range(3):
                answer = rng.integers(2, VOCAB, rng.integers(2, 5)).tolist()
                mu = (-2.5 + 0.5 * rng.standard_normal(len(answer))).tolist()
                reward = float(rollout == task % 3)
                samples.append({"prompt": prompt, "answer": answer, "mu": mu, "reward": reward, "task": task, "rollout": rollout, **same})
        return make_batch(samples, stage_step=stage_step)

    return make


@pytest.fixture
def demonstrations(make_batch: Rollouts) -> Rollouts:
    """`demonstrations(step)`: eight prompts of one token, each with its own answer."""

    def make(stage_step: int = 0) -> TrainBatch:
        samples = [{"prompt": [p], "answer": [p + 1, 1], "mu": [0.0, 0.0]} for p in range(2, 10)]
        return make_batch(samples, kind="sft", stage_step=stage_step)

    return make


@pytest.fixture(scope="session")
def table_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("table")
    (path / "table.json").write_text(json.dumps({"vocab": VOCAB, "max_position": 3, "eos": 1}))
    return path


@pytest.fixture(params=["torch", "table"])
def make_either(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`make_either(**settings)`: a trainer of either backend, by the settings of `tests.support.trainers.config`."""
    directory: Path = request.getfixturevalue({"torch": "model_dir", "table": "table_dir"}[request.param])
    return partial(trainers.make, directory, backend=request.param)


WIDTHS: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 64}
SIZES: dict[str, Any] = {**WIDTHS, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def write_random(path: Path, kind: str, dtype: str, options: dict[str, Any]) -> Path:
    """A model directory with random weights."""
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**options, initializer_range=0.2)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).to(getattr(torch, dtype))
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path


def maker(folders: pytest.TempPathFactory, kind: str, sizes: dict[str, Any]) -> Models:
    def make(dtype: str = "float32", **changes: Any) -> Path:
        return write_random(folders.mktemp(kind), kind, dtype, sizes | changes)

    return make


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """`make_model(dtype=..., **config)`: directory of a Qwen3 of 2 layers and hidden size 32, with random weights."""
    return maker(tmp_path_factory, "Qwen3", SIZES | {"tie_word_embeddings": True})


@pytest.fixture(scope="session")
def model_dir(make_model: Models) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def make_mixture(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """`make_mixture(dtype=..., **config)`: directory of a Qwen3-MoE of 2 layers with 4 experts, 2 a token, with random weights."""
    return maker(tmp_path_factory, "Qwen3Moe", SIZES | EXPERTS)


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of Qwen3-0.6B's shape, made on a GPU."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    more: dict[str, Any] = {"head_dim": 128, "intermediate_size": 3072, "tie_word_embeddings": True, "max_position_embeddings": 32768}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model: Any = Qwen3ForCausalLM(Qwen3Config(vocab_size=151_936, **sizes, **more))
    path = tmp_path_factory.mktemp("qwen3-0.6b")
    model.to(torch.bfloat16).save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return path
