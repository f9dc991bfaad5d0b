"""The torch trainer on a GPU: digests and snapshots there, bitwise numerics, the layouts and the memory of a 0.6B model.

`scripts/gpu/tests.sh` runs them and shows what was measured.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamrl.algorithms.divergences import candidate_divergence
from streamrl.algorithms.logprobs import GPU_CHUNK_ELEMENTS, LinearHead, linear_logprobs
from streamrl.algorithms.nucleus import support
from streamrl.algorithms.recorded import Recorded
from streamrl.config.loss import CorrectionConfig, KLConfig, RejectionConfig
from streamrl.config.registry import Role
from streamrl.config.tree import LossConfig, OptimizerConfig
from streamrl.core.batches import TrainBatch
from streamrl.core.packing import plan_micro_batches
from streamrl.schemas.versions import Version
from streamrl.tensors.digest import combine, tensor_digest
from streamrl.trainers.torch.causal_lm import CausalLM
from streamrl.weights.manifest import Content
from tests.support import trainers
from tests.support.measured import Measured, say
from tests.support.scoring import score
from tests.support.trainers import Rollouts

# As the trainer's process does before torch begins: cuBLAS reads it once.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
VOCAB = 151_936
make = partial(trainers.make, rate=1e-4, dtype="bfloat16", device="cuda")


def host_digest(trainer: Any) -> str:
    """Of the parameters, by way of the host."""
    return combine(
        {name: tensor_digest(p.detach().cpu().reshape(-1).view(torch.uint8).numpy(), p.element_size()) for name, p in trainer.parameters}
    )


@pytest.fixture
def groups(make_batch: Rollouts) -> Rollouts:
    """`groups(count, prompt, answer)`: groups of 4 rollouts with a common prompt and answers of about `answer` tokens."""

    def make(count: int, prompt: int, answer: int, vocab: int = VOCAB, **same: Any) -> TrainBatch:
        rng = np.random.default_rng(count)
        samples: list[dict[str, Any]] = []
        for task in range(count):
            question = rng.integers(2, vocab, prompt + task).tolist()
            for rollout in range(4):
                tokens = rng.integers(2, vocab, int(rng.integers(answer // 2, answer + 1))).tolist()
                mu = (-np.log(vocab) + 0.1 * rng.standard_normal(len(tokens))).tolist()
                row = {"prompt": question, "answer": tokens, "mu": mu, "reward": float(rollout == task % 4), "task": task}
                samples.append({**row, "rollout": rollout, **same})
        return make_batch(samples)

    return make


def test_digests_and_snapshots_follow_the_steps(make_model: Any, rollouts: Rollouts) -> None:
    trainer = make(make_model())
    assert trainer.step(rollouts()).digest == host_digest(trainer)
    for step in range(1, 6):
        result = trainer.step(rollouts(step))
        shards = list(trainer.shards())
        later = trainer.step(rollouts(step + 10))
        content = Content(shards)
        assert content.digest == result.digest != later.digest
        assert later.digest == host_digest(trainer)
        assert {shard.dtype for shard in shards} == {"bfloat16"}
        host = {s.name: tensor_digest(s.host(), 2) for s in shards}
        assert combine(host) == result.digest
        del shards, content  # with one buffer the next snapshot waits until nobody holds this one


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8, "top_k": 6, "temperature": 0.7}])
def test_bitwise_numerics_are_equal_also_restored(make_model: Any, rollouts: Rollouts, tmp_path: Path, sampling: dict[str, Any]) -> None:
    directory = make_model()
    one, two = (make(directory, numerics="bitwise", minibatches=2) for _ in range(2))
    for step in range(3):
        assert one.step(rollouts(step, **sampling)) == two.step(rollouts(step, **sampling))
    one.save(tmp_path / "at", b"extra", version=Version(0, 3)).result()
    resumed = make(directory, numerics="bitwise", minibatches=2)
    assert resumed.load(tmp_path / "at") == b"extra"
    for step in range(3, 6):
        assert resumed.step(rollouts(step, **sampling)).digest == two.step(rollouts(step, **sampling)).digest


def test_a_checkpoint_is_of_the_moment_it_was_asked_for_while_steps_go_on(make_model: Any, rollouts: Rollouts, tmp_path: Path) -> None:
    directory = make_model()
    trainer = make(directory, numerics="bitwise")
    for number in range(1, 7):
        trainer.step(rollouts(number))
        saved = trainer.save(tmp_path / str(number), b"", version=Version(0, number))
        following = trainer.step(rollouts(number + 100))
        saved.result()
        again = make(directory, numerics="bitwise")
        again.load(tmp_path / str(number))
        assert again.step(rollouts(number + 100)).digest == following.digest


LOSSES = {
    "critic": LossConfig(
        advantage="ppo",
        policy="gspo",
        whiten="on",
        kl=KLConfig(loss_coef=0.1, estimator="k3", unbiased=True),
        entropy_coef=0.01,
        correction=CorrectionConfig(level="sequence", normalize=True, reject=(RejectionConfig(level="sequence_max", high=50.0),)),
    ),
    "linear": LossConfig(
        policy="sapo", proximal="log_linear", correction=CorrectionConfig(kind="mask", level="geometric", low=0.1, high=9)
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_losses_of_sequences_give_equal_bits_and_nearly_those_of_a_cpu(model_dir: Path, rollouts: Rollouts, loss: LossConfig) -> None:
    options: dict[str, Any] = {"dtype": "float32", "minibatches": 2, "loss": loss, "numerics": "bitwise"}
    one, two, here = make(model_dir, **options), make(model_dir, **options), make(model_dir, **options, device="cpu")
    for step in range(3):
        found, again, slow = (trainer.step(rollouts(step)) for trainer in (one, two, here))
        assert found == again
        assert found.metrics == pytest.approx(slow.metrics, rel=2e-2, abs=1e-3)


def test_parameters_are_the_rounded_masters(make_model: Any, rollouts: Rollouts) -> None:
    trainer: Any = make(make_model(), optimizer=OptimizerConfig(learning_rate=1e-6))
    for step in range(5):
        trainer.step(rollouts(step))
    masters = dict(trainer.optimizer.masters)
    assert all(masters[name].dtype == torch.float32 and torch.equal(masters[name].bfloat16(), p) for name, p in trainer.parameters)
    assert any(not torch.equal(masters[name], p.float()) for name, p in trainer.parameters)


def test_a_small_model_learns_the_same_on_both_devices(model_dir: Path, rollouts: Rollouts) -> None:
    there, here = make(model_dir, dtype="float32"), make(model_dir, dtype="float32", device="cpu")
    for step in range(3):
        a, b = there.step(rollouts(step)).metrics, here.step(rollouts(step)).metrics
        assert a == pytest.approx(b, rel=2e-3, abs=1e-4)
    assert np.abs(score(there, rollouts(9), Role.POLICY) - score(here, rollouts(9), Role.POLICY)).max() < 1e-3


@pytest.mark.parametrize(("dtype", "most", "mean"), [(torch.float32, 2e-3, 1e-4), (torch.bfloat16, 0.3, 0.03)])
def test_layouts_agree_at_the_shape_of_0_6b(qwen: Path, groups: Rollouts, dtype: torch.dtype, most: float, mean: float) -> None:
    batch = groups(3, 300, 400, temperature=0.8)
    policy = CausalLM(qwen, dtype, torch.device("cuda"))
    assert policy.free_masks
    wanted = np.ones(batch.num_tokens, np.bool_)
    wanted[batch.offsets[:-1]] = False
    found: list[np.ndarray] = []
    for share, several in ((True, True), (False, True), (False, False)):
        plans = plan_micro_batches(
            batch, wanted, np.arange(batch.num_samples), budget=8192, share_prefixes=share, several_per_row=several, width=policy.width
        )
        values = np.zeros(batch.num_tokens, np.float32)
        with torch.no_grad():
            for plan in plans:
                values[plan.target] = policy.predict(plan, batch)[0].float().cpu().numpy()
        found.append(values)
    for other in found[1:]:
        distance = np.abs(other - found[0])
        say(f"layouts {dtype}: max {distance.max():.2e}, mean {distance.mean():.2e} nats")
        assert distance.max() < most and distance.mean() < mean


@pytest.mark.parametrize("truncated", [False, True])
def test_log_probs_of_a_large_vocabulary_stay_small(truncated: bool) -> None:
    """16,384 tokens of 151,936: all logits at once would be 9.3 GiB in float32, and several times that with the gradient."""
    tokens = 16_384 if not truncated else 4096
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, 1024, device="cuda", generator=generator, dtype=torch.bfloat16, requires_grad=True)
    weight = (0.02 * torch.randn(VOCAB, 1024, device="cuda", generator=generator)).bfloat16().requires_grad_()
    targets = torch.randint(0, VOCAB, (tokens,), device="cuda", generator=generator)
    ones = torch.ones(tokens, device="cuda")
    options: dict[str, Any] = {}
    if truncated:
        options = {"top_p_M": 0.9 * ones, "top_k_M": torch.full((tokens,), 50, device="cuda")}
    with Measured() as took:
        head = LinearHead(weight)
        logprobs, entropy = linear_logprobs(hidden, targets, head, temperature_M=ones, chunk_elements=GPU_CHUNK_ELEMENTS, **options)
        logprobs.sum().backward()
    say(f"log-probs of {tokens} tokens, truncated={truncated}: peak {took.more:.1f} GiB, {took.ms:.0f} ms with gradient")
    assert took.more < (12 if truncated else 7)
    sample = slice(0, 64)
    full = (hidden[sample].detach() @ weight.detach().T).float()
    if truncated:
        full = full.masked_fill(~support(full, targets[sample], options["top_p_M"][sample], options["top_k_M"][sample]), -torch.inf)
    expected = full.log_softmax(-1).gather(-1, targets[sample, None])[:, 0]
    assert (logprobs[sample].detach() - expected).abs().max() < 0.05
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all() and torch.isfinite(entropy).all()


def test_recorded_candidates_give_the_same_bits_twice_and_the_log_probs_of_a_cpu() -> None:
    """Their kernels (scatter, gather, sums by token) have deterministic forms, which `run.numerics = "bitwise"` asks for."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 64, generator=generator), 0.3 * torch.randn(5000, 64, generator=generator)
    sizes = torch.randint(1, 400, (300,), generator=generator)
    kept = torch.zeros(300, 5000, dtype=torch.bool)
    for row, size in enumerate(sizes.tolist()):
        kept[row, torch.randperm(5000, generator=generator)[:size]] = True
    token, ids = kept.nonzero().unbind(1)
    targets = torch.tensor([one.nonzero()[-1, 0] for one in kept])
    bounds = np.concatenate([[0], sizes.cumsum(0).numpy()])

    def found(device: str) -> list[torch.Tensor]:
        asked = Recorded(ids.to(device), token.to(device), (sizes > 0).to(device), bounds)
        own = weight.to(device).requires_grad_()
        logprobs, entropy, known = linear_logprobs(
            *(hidden.to(device), targets.to(device), LinearHead(own)),
            temperature_M=torch.ones(300, device=device),
            recorded=asked,
            candidates=asked,
            chunk_elements=100 * 5000,
        )
        far = candidate_divergence(known, known.roll(1), asked, torch.ones(300, dtype=torch.bool, device=device), "topk_tv")
        logprobs.sum().backward()
        assert own.grad is not None
        return [one.detach().cpu() for one in (logprobs, entropy, known, far, own.grad)]

    torch.use_deterministic_algorithms(True)
    try:
        first, second, cpu = found("cuda"), found("cuda"), found("cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(first, cpu, strict=True))


def test_layer_checkpointing_saves_memory_and_changes_little(qwen: Path, groups: Rollouts) -> None:
    batch = groups(2, 500, 1500)
    peaks: dict[bool, float] = {}
    results: dict[bool, Any] = {}
    for checkpointing in (False, True):
        trainer = make(qwen, numerics="bitwise", micro_tokens=8192, activations=0 if checkpointing else "all")  # rows alike
        trainer.step(batch)
        with Measured() as took:
            results[checkpointing] = trainer.step(batch)
        peaks[checkpointing] = took.peak
        say(f"0.6B step of {batch.num_tokens} tokens, checkpointing={checkpointing}: {took.ms:.0f} ms, peak {took.peak:.1f} GiB")
        del trainer
        torch.cuda.empty_cache()
    assert peaks[True] < peaks[False] - 2
    assert results[True].digest == results[False].digest
