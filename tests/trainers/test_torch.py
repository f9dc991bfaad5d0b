"""The torch trainer's own promises: exact masks, every layout and head the same, the directory of Hugging Face, what a step tells."""

import time
from operator import eq, ne
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import CohereConfig, CohereForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GraniteConfig, GraniteForCausalLM

from streamrl.config.loss import KLConfig, LossConfig
from streamrl.config.registry import Role
from streamrl.config.tree import OptimizerConfig
from streamrl.core.batches import LogitBiases, TrainBatch
from streamrl.core.packing import plan_micro_batches
from streamrl.errors import ConfigError, TrainingError
from streamrl.schemas.versions import Version
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.trainers.torch.kernels import Kernels
from tests.support import models
from tests.support.batches import by_turn
from tests.support.errors import raises
from tests.support.scoring import score
from tests.support.trainers import Models, Rollouts, make

CPU = torch.device("cpu")


def plain_logprobs(directory: Path, batch: TrainBatch) -> npt.NDArray[np.float32]:
    """transformers' own forward in float64, one sample at a time."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    found = np.zeros(batch.num_tokens, np.float32)
    for first, last in zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True):
        ids = torch.from_numpy(batch.tokens[first:last].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        # The state before a token gives its logits: they are divided by the temperature that the token was drawn at.
        logp = (logits / torch.from_numpy(batch.temperature[first + 1 : last].astype(np.float64))[:, None]).log_softmax(-1)
        found[first + 1 : last] = logp.gather(-1, ids[1:, None])[:, 0].numpy()
    return found


def as_transformers(trainer: Any, directory: Path, batch: TrainBatch) -> bool:
    return np.abs(score(trainer, batch, Role.POLICY) - plain_logprobs(directory, batch)).max() < 2e-5


LAYOUTS: dict[str, dict[str, Any]] = {
    "shared": {},
    "several": {"share_prefixes": False},
    "rows": {"share_prefixes": False, "several_per_row": False},
    "cut": {"budget": 20},
    "packed": {"share_prefixes": False, "row_length": 20},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_transformers_log_probs(model_dir: Path, rollouts: Rollouts, layout: str) -> None:
    batch = by_turn(rollouts())
    policy = CausalLM(model_dir, torch.float32, CPU, kernels=Kernels(attention="packed" if layout == "packed" else "sdpa"))
    assert (policy.free_masks, policy.packs) == (layout != "packed", layout == "packed")
    wanted = np.ones(batch.num_tokens, np.bool_)
    wanted[batch.offsets[:-1]] = False
    plans = plan_micro_batches(batch, wanted, np.arange(batch.num_samples), **{"budget": 10_000, **LAYOUTS[layout]})
    assert any(plan.plain for plan in plans) == (layout == "rows")
    found = np.zeros(batch.num_tokens, np.float32)
    for plan in plans:
        found[plan.target] = policy.predict(plan, batch)[0].detach().numpy()
    assert np.abs(found - plain_logprobs(model_dir, batch)).max() < 2e-5


def test_gradients_do_not_depend_on_the_layout(model_dir: Path, rollouts: Rollouts) -> None:
    batch = rollouts()
    policy = CausalLM(model_dir, torch.float64, CPU)
    weights = torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64)
    gradients: list[list[torch.Tensor]] = []
    for share, several, budget in ((True, True, 10_000), (False, False, 10_000), (True, True, 1)):
        for plan in plan_micro_batches(batch, batch.loss_mask, np.arange(12), budget=budget, share_prefixes=share, several_per_row=several):
            (policy.predict(plan, batch)[0] * weights[torch.from_numpy(plan.target)]).sum().backward()
        gradients.append([p.grad for _, p in policy.parameters() if p.grad is not None])
        policy.module.zero_grad()
    assert len(gradients[0]) == len(list(policy.parameters()))
    # Not tighter: the model's norms and rotary tables are float32 whatever its type.
    for other in gradients[1:]:
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in zip(gradients[0], other, strict=True))
    assert min(float(g.abs().max()) for g in gradients[0]) > 1e-2


WINDOWS = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 0}
SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "GPT2": {"vocab_size": 16, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16},
    "Gemma": {**SIZES, "num_key_value_heads": 1, "head_dim": 16},
    "Granite": {**SIZES, "num_key_value_heads": 2, "logits_scaling": 4.0},
}


def test_other_models_score_as_transformers_does(make_model: Models, rollouts: Rollouts, tmp_path: Path) -> None:
    batch = rollouts()
    for changes in ({"tie_word_embeddings": False}, WINDOWS):
        directory = make_model(**changes)
        assert CausalLM(directory, torch.float32, CPU).free_masks == (changes is not WINDOWS)
        assert as_transformers(make(directory), directory, batch)
    for name, sizes in FAMILIES.items():
        head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
        getattr(transformers, f"{name}{head}")(getattr(transformers, f"{name}Config")(**sizes)).save_pretrained(tmp_path / name)
        trainer = make(tmp_path / name)
        assert as_transformers(trainer, tmp_path / name, batch) and trainer.step(batch).finite, name


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_windows_stay_in_packed_rows(kind: str, make_batch: Rollouts, tmp_path: Path) -> None:
    """Samples of 8 to 26 tokens, three times the window."""
    models.build(kind, seed=0).save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(2, models.VOCABULARY, (4, 26)).tolist()
    batch = make_batch([{"prompt": ids[:5], "answer": ids[5 : 8 + 6 * k], "mu": [-1.0] * (3 + 6 * k)} for k, ids in enumerate(tokens)])
    policies = [CausalLM(tmp_path, torch.float32, CPU, kernels=Kernels(attention=name)) for name in ("packed", "sdpa")]
    assert [(one.packs, one.free_masks, one.windowed) for one in policies] == [(True, False, True), (False, False, True)]
    weights = torch.linspace(-1, 1, batch.num_tokens)
    gradients: list[dict[str, torch.Tensor]] = []
    layouts: list[dict[str, Any]] = [LAYOUTS["packed"] | {"row_length": 40}, LAYOUTS["rows"]]
    for policy, layout in zip(policies, layouts, strict=True):
        found = np.zeros(batch.num_tokens, np.float32)
        for plan in plan_micro_batches(batch, batch.loss_mask, np.arange(batch.num_samples), budget=10_000, **layout):
            logprobs = policy.predict(plan, batch)[0]
            (logprobs * weights[torch.from_numpy(plan.target)]).sum().backward()
            found[plan.target] = logprobs.detach().numpy()
        expected = np.where(batch.loss_mask, plain_logprobs(tmp_path, batch), 0)
        assert np.abs(found - expected).max() < 2e-5
        gradients.append({name: p.grad for name, p in policy.parameters() if p.grad is not None})
    packed, alone = gradients
    assert packed.keys() == alone.keys()
    for name, mine in packed.items():
        assert torch.allclose(mine, alone[name], rtol=1e-3, atol=1e-4 * float(alone[name].abs().max())), name


def test_a_head_that_does_more_than_project_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: Path) -> None:
    forward = transformers.Qwen3ForCausalLM.forward

    def shifted(self: Any, *args: Any, **options: Any) -> Any:
        output: Any = forward(self, *args, **options)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(transformers.Qwen3ForCausalLM, "forward", shifted)
    with raises(ConfigError, model="Qwen3ForCausalLM"):
        CausalLM(model_dir, torch.float32, CPU)
    with raises(ConfigError, path=str(tmp_path)):
        CausalLM(tmp_path, torch.float32, CPU)


def test_exports_load_in_transformers_tied_weights_once(model_dir: Path, rollouts: Rollouts, tmp_path: Path, make_model: Models) -> None:
    trainer = make(model_dir)
    trainer.step(rollouts())
    trainer.export(tmp_path / "hf")
    assert as_transformers(trainer, tmp_path / "hf", rollouts(1))
    assert (tmp_path / "hf" / "tokenizer_config.json").read_text() == "{}"
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 1
    tied, untied = ({shard.name for shard in make(path).shards()} for path in (model_dir, make_model(tie_word_embeddings=False)))
    assert untied - tied == {"lm_head.weight"} and "model.embed_tokens.weight" in tied
    make(model_dir).save(tmp_path / "at", b"", version=Version()).result()
    with raises(TrainingError, path=str(tmp_path / "at"), what="parameters", parameter=ANY):
        make(make_model(intermediate_size=48)).load(tmp_path / "at")


def test_the_gradient_norm_is_clipped(model_dir: Path, rollouts: Rollouts, tmp_path: Path) -> None:
    def mean_norm(clip_norm: float) -> tuple[float, float]:
        trainer = make(model_dir, optimizer=OptimizerConfig(clip_norm=clip_norm, beta1=0.0))
        norm = trainer.step(rollouts()).metrics["train/grad_norm"]
        trainer.save(tmp_path / str(clip_norm), b"", version=Version()).result()
        moments = load_file(tmp_path / str(clip_norm) / "optimizer.safetensors")
        return norm, float(torch.cat([v.ravel() for k, v in moments.items() if k.endswith("exp_avg")]).norm())

    free, kept = mean_norm(0.0)
    assert kept == pytest.approx(free, rel=1e-4)
    assert mean_norm(free / 10) == pytest.approx((free, free / 10), rel=1e-4)


def test_a_step_tells_the_times_of_its_parts_and_the_samples_of_an_optimizer_step(model_dir: Path, rollouts: Rollouts) -> None:
    held = LossConfig(kl=KLConfig(loss_coef=0.1, estimator="k3", reference=str(model_dir)))
    start_s = time.perf_counter()
    several = make(model_dir, held, minibatches=2).step(rollouts())
    took_s = time.perf_counter() - start_s
    assert several.times.keys() == {"perf/log_probs_time", "perf/ref_log_probs_time", "perf/actor_train_time"}
    assert min(several.times.values()) > 0 and sum(several.times.values()) < took_s
    trainer = make(model_dir)
    alone, again = trainer.step(rollouts()), trainer.step(rollouts(9))
    assert alone.times.keys() == again.times.keys() == {"perf/actor_train_time"}, "one step: the policy itself is what it began from"
    assert (several.metrics["train/global_batch_size"], alone.metrics["train/global_batch_size"]) == (6.0, 12.0)
    once_more = make(model_dir).step(rollouts())
    assert once_more.times != alone.times, "times are no part of what a step comes to"
    for same, other, one in ((once_more, again, alone), (once_more.tokens, again.tokens, alone.tokens)):
        assert one is not None and eq(same, one) and not ne(same, one)
        assert ne(other, one) and not eq(other, one)


def test_the_process_keeps_its_own_switches(model_dir: Path, rollouts: Rollouts) -> None:
    trainer = make(model_dir)
    before = torch.are_deterministic_algorithms_enabled()
    trainer.step(rollouts())
    with pytest.raises(TrainingError):
        trainer.step(rollouts(reward=float("nan")))
    assert torch.are_deterministic_algorithms_enabled() == before
    assert torch.get_num_threads() == 1


class OtherLinear(torch.nn.Linear):
    """What an adapter or a quantised layer looks like from outside: it may do more than its weight says."""


WIDE = {**SIZES, "num_key_value_heads": 2, "initializer_range": 0.3}  # so that a cap and a scale show
KINDS = {
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**WIDE, head_dim=16, final_logit_softcapping=2.0)),
    "cohere": (CohereForCausalLM, CohereConfig(**WIDE, logit_scale=0.5)),
    "granite": (GraniteForCausalLM, GraniteConfig(**WIDE, logits_scaling=4.0)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [torch.nn.Linear, OtherLinear])
def test_all_that_is_computed_is_the_models_own(kind: str, head: type[torch.nn.Linear], tmp_path: Path, rollouts: Rollouts) -> None:
    model, config = KINDS[kind]
    model(config).save_pretrained(tmp_path)
    policy = CausalLM(tmp_path, torch.float32, CPU)
    policy.module.get_output_embeddings().__class__ = head
    biases: list[dict[int, float]] = [{3: 1.5, 15: -2.0}, {}, {0: 0.5}]
    batch = rollouts(0, temperature=0.7)
    of = np.arange(batch.num_tokens, dtype=np.int32) % 3
    batch = msgspec.structs.replace(batch, logit_biases=LogitBiases.from_tables(np.where(of == 1, -1, of).astype(np.int32), biases))
    added = torch.zeros(batch.num_tokens, 16)
    for row, bias in zip(added, of.tolist(), strict=True):
        for token, value in biases[bias].items():
            row[token] = value
    loss = torch.zeros(())
    for micro in plan_micro_batches(batch, batch.loss_mask, np.arange(batch.num_samples), budget=64, several_per_row=False):
        logprobs, entropy = policy.predict(micro, batch, entropy_gradient=True)
        loss = loss + logprobs.sum() + 0.5 * entropy.sum()
    expected = torch.zeros(())
    for first, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.tokens[first:end].astype("int64"))
        logits = policy.module(input_ids=tokens[None], use_cache=False).logits[0, :-1] + added[first + 1 : end]
        logp = (logits / 0.7).log_softmax(-1)
        trained = torch.from_numpy(batch.loss_mask[first + 1 : end])
        expected = expected + logp.gather(-1, tokens[1:, None])[trained].sum() - 0.5 * (logp.exp() * logp)[trained].sum()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    names, leaves = zip(*policy.parameters(), strict=True)
    for name, mine, reference in zip(names, torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, leaves), strict=True):
        assert torch.allclose(mine, reference, rtol=1e-3, atol=1e-4 * float(reference.abs().max())), name
