"""Heads that scale and cap their logits: against the model's own forward, through the fused head and through a head of another class."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, GraniteConfig, GraniteForCausalLM

from streamrl.core.batches import LogitBiases
from streamrl.core.packing import plan_micro_batches
from streamrl.trainers.torch.causal_lm import CausalLM
from tests.support.trainers import Rollouts


class OtherLinear(torch.nn.Linear):
    """What an adapter or a quantised layer looks like from outside: it may do more than its weight says."""


SIZES: dict[str, Any] = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
SIZES |= {"num_key_value_heads": 2, "initializer_range": 0.3}  # wide enough that a cap and a scale show
KINDS = {
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, head_dim=16, final_logit_softcapping=2.0)),
    "cohere": (CohereForCausalLM, CohereConfig(**SIZES, logit_scale=0.5)),
    "granite": (GraniteForCausalLM, GraniteConfig(**SIZES, logits_scaling=4.0)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", [torch.nn.Linear, OtherLinear])
def test_all_that_is_computed_is_the_models_own(kind: str, head: type[torch.nn.Linear], tmp_path: Path, rollouts: Rollouts) -> None:
    model, config = KINDS[kind]
    model(config).save_pretrained(tmp_path)
    policy = CausalLM(tmp_path, torch.float32, torch.device("cpu"))
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
