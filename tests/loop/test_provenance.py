"""G1 and G2 on a finished run: every token's version and log-prob hold up under a transformers replay; swaps restart nothing."""

import json
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from streamrl.bus.protocol import Bus
from streamrl.config import tree
from streamrl.data.model import ensure_model
from streamrl.runtime.rundir import RunDir
from streamrl.schemas.codec import decode
from streamrl.schemas.samples import Sample
from streamrl.schemas.subjects import SAMPLES, WEIGHTS, Subjects
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.schemas.weights import Manifest
from streamrl.weights.factory import make_transports
from tests.support.harness import make_run, run_to_end
from tests.support.producing import samples_in
from tests.support.streams import stored
from tests.support.wanted import fetched

REWARD = "def share_of_letters(task, episode):\n    return sum(c.isalpha() for c in episode.completion) / 40\n"
NUM_CHECKED = 60
TOLERANCE = 1e-4


def provenance_config(tmp_path: Path, run_id: str) -> tree.Config:
    """Long answers and a high learning rate, so that versions differ and responses span several of them."""
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1=", "label": str(n + 1)}) + "\n" for n in range(40)))
    (tmp_path / "reward.py").write_text(REWARD)
    return tree.Config(
        run=tree.RunConfig(name=run_id, steps=14, seed=5),
        model=tree.ModelConfig(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=96, max_len=80),
        data=tree.DataConfig(train=str(tmp_path / "train.jsonl")),
        tasks=tree.TasksConfig(batch_tasks=4, num_rollouts=4, max_staleness=6, drop_zero_variance=False),
        sampling=Sampling(max_new_tokens=60, ignore_eos=True),
        producer=tree.ProducerConfig(concurrency=32),
        reward=tree.RewardConfig(kind=f"{tmp_path / 'reward.py'}:share_of_letters", children=1),
        engine=tree.EngineConfig(slots=64),
        trainer=tree.TrainerConfig(optimizer=tree.OptimizerConfig(learning_rate=3e-3)),
        weights=tree.WeightsConfig(keep=0),
    )


async def stored_weights(bus: Bus, config: tree.Config, run: RunDir) -> dict[Version, dict[str, torch.Tensor]]:
    """The parameters of every published version."""
    transports = make_transports(config.weights, bus=bus, run=config.run.name, policy="policy", run_dir=run.path)
    found: dict[Version, dict[str, torch.Tensor]] = {}
    for message in await stored(bus, WEIGHTS, Subjects(config.run.name).weights("policy")):
        manifest = decode(message.body, Manifest)
        data = await fetched(transports[manifest.transport], manifest)
        found[manifest.version] = {
            spec.name: torch.from_numpy(np.frombuffer(data, np.float32, spec.nbytes // 4, spec.offset).reshape(spec.shape).copy())
            for spec in manifest.tensors
        }
    return found


def token_versions(sample: Sample) -> list[Version]:
    """The version of each of the model's tokens."""
    return [span.version for span in sample.spans if span.version is not None for _ in range(span.length)]


def largest_difference(sample: Sample, versions: list[Version], models: Mapping[Version, PreTrainedModel]) -> float:
    """Log-probs of a token-by-token replay with a KV cache, each token by the model of its version, against the stored ones."""
    prompt = int(np.argmax(sample.loss_mask))
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    cache = DynamicCache()
    worst = 0.0
    feed = tokens[:prompt]
    with torch.no_grad():
        for position, version in enumerate(versions):
            logits = models[version](feed[None], past_key_values=cache, use_cache=True).logits[0, -1]
            token = tokens[prompt + position]
            logprob = torch.log_softmax(logits.double() / sample.sampling.temperature, -1)[token]
            worst = max(worst, abs(float(logprob) - float(sample.logprobs[prompt + position])))
            feed = token[None]
    return worst


@pytest.mark.slow
async def test_provenance_of_a_finished_run(tmp_path: Path, nats_bus: Bus, run_id: str) -> None:
    run, config = make_run(tmp_path, provenance_config(tmp_path, run_id))
    model_dir = ensure_model(config, run.model_dir)
    await run_to_end(config, run, nats_bus)
    samples = samples_in(await stored(nats_bus, SAMPLES))
    weights = await stored_weights(nats_bus, config, run)
    models: dict[Version, PreTrainedModel] = {}
    for version, parameters in weights.items():
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        missing = model.load_state_dict(parameters, strict=False).missing_keys
        assert set(missing) <= {"lm_head.weight"}
        model.tie_weights()
        models[version] = model.eval()
    chosen = random.Random(0).sample(samples, NUM_CHECKED)
    assert max(largest_difference(s, token_versions(s), models) for s in chosen) <= TOLERANCE

    # A swap lies inside the life of a request that finished: its tokens are of several versions, and all of them are there.
    spanning = [s for s in samples if len(set(token_versions(s))) > 1]
    assert spanning, "no response spans versions: the test shows nothing"
    assert all(len(token_versions(s)) == config.sampling.max_new_tokens for s in samples)
    # Restarted requests would begin again at one version: versions only grow along a response, and its start is not its end.
    assert all(token_versions(s) == sorted(token_versions(s)) for s in samples)

    # Control: moving a span's end by one token is caught, but for the odd token that both versions give the same probability.
    caught, moved = 0, spanning[:20]
    for sample in moved:
        versions = token_versions(sample)
        flip = next(i for i in range(1, len(versions)) if versions[i] != versions[i - 1])
        versions[flip] = versions[flip - 1]
        caught += largest_difference(sample, versions, models) > TOLERANCE
    assert caught >= 0.9 * len(moved), f"{caught} of {len(moved)} moved spans were caught"
