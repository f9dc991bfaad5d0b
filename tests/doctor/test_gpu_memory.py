"""Whether models fit GPUs, from configurations and descriptions of models alone."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.loss import CriticConfig, DistillationConfig, KLConfig, LossConfig
from streamrl.config.ray import RayConfig
from streamrl.config.tree import Config, EvaluationConfig, ModelConfig, TasksConfig, TrainerConfig, WeightsConfig
from streamrl.doctor import gpu_memory as reckoning
from streamrl.doctor.backend import divides
from streamrl.errors import LaunchError
from streamrl.models.megatron.names import Place, architecture, parameters
from streamrl.schemas.tasks import Sampling
from streamrl.trainers.activations import GIB
from streamrl.trainers.memory import models_of, rank_memory
from tests.support.plans import MODELS

QWEN_4B = {key: value for key, value in MODELS["Qwen3-4B"].items() if key != "model_type"}
QWEN_1_7B = QWEN_4B | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144}
ON_ONE = SglangConfig(flags={"mem_fraction_static": 0.35}, swap="flip", gpus=(0,))


def written(place: Path, sizes: dict[str, Any] = QWEN_4B) -> ModelConfig:
    """The section of a model of these sizes, which is described in a directory."""
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(sizes))
    return ModelConfig(path=str(place), dtype="bfloat16", max_len=100_000)


def lasting(config: Config, gib: int = 140) -> dict[str, float]:
    """GiB of a rank, by what they are for."""
    models = models_of(config, reckoning.read_shape)
    assert models is not None
    found = rank_memory(config, models, gpu_bytes=gib << 30, compiled=True).lasting
    return {what: nbytes / GIB for what, nbytes in found}


@pytest.mark.parametrize(
    ("gib", "asked", "shards", "state", "says"),
    [
        (160, "auto", 1, "ok", "36 of 36 layers keep"),
        (40, "auto", 1, "warn", "0 of 36 layers keep"),
        (130, "auto", 1, "ok", "of 36 layers keep"),
        (115, "all", 1, "warn", "of 36 layers keep"),
        (130, "all", 4, "ok", "36 of 36 layers keep"),
        (40, "auto", 4, "ok", "of 36 layers keep"),
        (130, 0, 1, "ok", "of 36 layers keep"),
    ],
)
def test_layers_that_keep_activations_are_reckoned_for_it(tmp_path: Path, gib: int, asked: Any, shards: int, state: str, says: str) -> None:
    trainer = TrainerConfig(micro_tokens=8192, activations=asked, compile="on", attention="packed", ranks=shards, shards=shards)
    config = Config(model=written(tmp_path), trainer=trainer)
    found = reckoning.check_activations(config, gib << 30)
    assert found is not None and (found.state, says in found.found) == (state, True), found
    # Snapshots of what is published are a rank's part, too.
    large = reckoning.check_activations(replace(config, weights=WeightsConfig(ring=64 * shards)), gib << 30)
    assert large is not None and large.state == "warn"
    (tmp_path / "config.json").write_text("[")
    assert reckoning.check_activations(config, gib << 30) is None


def test_each_model_is_reckoned_by_its_own_shape_and_once(tmp_path: Path) -> None:
    small, large = written(tmp_path / "small", QWEN_1_7B), written(tmp_path / "large")
    plain = Config(model=small)
    (policy, numbers), (copies, published) = lasting(plain).items()
    assert policy == "to train the policy" and numbers == pytest.approx(18 * 1.72e9 / GIB, rel=0.01)
    assert "weights.ring" in copies and published == pytest.approx(2 * 1.72e9 / GIB, rel=0.01)
    assert lasting(replace(plain, weights=WeightsConfig(transport="ipc")))[copies] == pytest.approx(2 * published)

    critic = lasting(replace(plain, loss=LossConfig(advantage="ppo", critic=CriticConfig(path=large.path))))
    assert critic["to train the critic"] == pytest.approx(18 * 4.02e9 / GIB, rel=0.01)

    kl = KLConfig(loss_coef=0.1)
    assert lasting(replace(plain, loss=LossConfig(kl=kl)))["for the reference"] == pytest.approx(2 * 1.72e9 / GIB, rel=0.01)
    teacher = DistillationConfig(coef=1.0, teacher=large.path)
    assert lasting(replace(plain, loss=LossConfig(distillation=teacher)))["for the teacher"] == pytest.approx(2 * 4.02e9 / GIB, rel=0.01)
    same = LossConfig(kl=replace(kl, reference=large.path), distillation=teacher)
    assert "for the teacher" not in lasting(replace(plain, loss=same)), "one directory is loaded once"
    assert "for the teacher" in lasting(replace(plain, loss=replace(same, kl=replace(same.kl, reference_every=3)))), "unless it is renewed"

    checked = replace(plain, trainer=TrainerConfig(check_logprobs=4), tasks=TasksConfig(max_staleness=3))
    assert lasting(checked)["of versions for trainer.check_logprobs"] == pytest.approx(4 * 2 * 1.72e9 / GIB, rel=0.01)


def test_a_part_holds_a_part_of_each_and_what_is_gathered(tmp_path: Path) -> None:
    loss = LossConfig(advantage="ppo", kl=KLConfig(loss_coef=0.1))
    config = Config(model=written(tmp_path), loss=loss, trainer=TrainerConfig(ranks=4, shards=4, check_logprobs=1))
    found = lasting(config)
    whole = lasting(replace(config, trainer=TrainerConfig(check_logprobs=1)))
    for what in ("policy", "critic"):  # in float32, with no bfloat16 beside it
        assert found[f"to train the {what}"] == pytest.approx(whole[f"to train the {what}"] * 16 / 18 / 4)
    assert found["for the reference"] == pytest.approx(whole["for the reference"] / 4)
    once = lasting(replace(config, trainer=replace(config.trainer, gather="step")))
    assert found["gathered"] == once["gathered"] > lasting(config, gib=40)["gathered"]


@pytest.mark.parametrize(
    ("gib", "shards", "state", "says"),
    [
        (141, 1, "ok", "GiB at least, its GPU has 141.0"),
        (72, 1, "fail", "trainer.shards = 2, with trainer.ranks a multiple of it"),
        (80, 2, "ok", ""),
        (24, 2, "fail", "trainer.shards = 4"),
        (2, 1, "fail", "take a larger GPU"),
        (7, 16, "fail", "7.5 GiB for a model before it is cut"),
    ],
)
def test_a_model_that_does_not_fit_a_rank_is_refused_with_parts_that_do(
    tmp_path: Path, gib: int, shards: int, state: str, says: str
) -> None:
    config = Config(model=written(tmp_path), trainer=TrainerConfig(ranks=shards, shards=shards))
    found = reckoning.check_trainer_memory(config, gib << 30)
    assert found is not None and found.state == state and says in found.found + found.hint, found
    assert reckoning.check_trainer_memory(replace(config, trainer=replace(config.trainer, device="cpu")), gib << 30) is None
    assert reckoning.check_trainer_memory(config, 0) is None, "there is no GPU"


def test_a_sample_longer_than_a_rank_can_hold_is_refused_with_the_tokens_that_fit(tmp_path: Path) -> None:
    config = Config(model=written(tmp_path), trainer=TrainerConfig(compile="on"))
    fine = reckoning.check_trainer_memory(config, 90 << 30)
    assert fine is not None and fine.state == "ok"
    long = replace(config, sampling=Sampling(max_new_tokens=90_000))
    found = reckoning.check_trainer_memory(long, 90 << 30)
    assert found is not None and found.state == "fail" and "for a sample of 90" in found.found
    fitting = int(found.hint.split(" fit;")[0].rpartition(" ")[2])
    most = replace(config, sampling=Sampling(max_new_tokens=fitting - config.data.max_prompt_tokens))
    more = replace(config, sampling=Sampling(max_new_tokens=fitting + 1 - config.data.max_prompt_tokens))
    states = [check.state for one in (most, more) if (check := reckoning.check_trainer_memory(one, 90 << 30))]
    assert states == ["ok", "fail"]


def test_ranks_that_share_a_sample_hold_one_that_is_too_long_for_a_rank(tmp_path: Path) -> None:
    """Keys and values of the whole sample stay, so that half of it takes more than half."""
    config = Config(model=written(tmp_path), trainer=TrainerConfig(compile="on"), sampling=Sampling(max_new_tokens=60_000))
    alone, shared = (
        reckoning.check_trainer_memory(replace(config, trainer=replace(config.trainer, ranks=context, context=context)), 90 << 30)
        for context in (1, 2)
    )
    assert alone is not None and alone.state == "fail" and "trainer.context = 2, with trainer.ranks" in alone.hint, alone
    assert shared is not None and shared.state == "ok", shared
    takes = [float(found.found.split(" for a sample of ")[0].rpartition(" ")[2]) for found in (alone, shared)]
    assert 0.5 * takes[0] < takes[1] < 0.6 * takes[0]


def test_trainer_and_sglang_share_a_gpu_as_far_as_the_fraction_goes(tmp_path: Path) -> None:
    model = written(tmp_path, QWEN_1_7B)

    def found(fraction: float | None, gib: int = 80, **engine: Any) -> tuple[str, str, str]:
        flags = {} if fraction is None else {"mem_fraction_static": fraction}
        config = Config(model=model, engine=EngineConfig(kind="sglang", sglang=replace(ON_ONE, flags=flags), **engine))
        check = reckoning.check_shared_gpus(config, gib << 30)
        assert check is not None
        return check.state, check.found, check.hint

    assert found(0.35)[0] == "ok" and "mem_fraction_static = 0.35 of the memory, 28.0" in found(0.35)[1]
    state, _, hint = found(0.7)
    assert state == "warn" and hint.startswith("set engine.sglang.flags.mem_fraction_static to 0.")
    most = float(hint.split(" to ")[1].split()[0])
    assert (found(most)[0], found(most + 0.01)[0]) == ("ok", "warn"), "the fraction of the hint is the greatest that fits"
    assert found(most, workers=2)[0] == "fail", "two engines take it twice"
    assert "2 engines" in found(most, workers=2)[1]
    assert found(0.05)[0] == "fail" and "too little" in found(0.05)[1]
    # Behind a trainer that has 8 bytes a parameter already and takes 12 more at its first step.
    last = 1 - 12 * 1.72e9 / (80 * GIB - 8 * 1.72e9)
    assert (found(last - 0.01)[0], found(last + 0.01)[0]) == ("warn", "fail")
    assert found(last + 0.01)[2] == hint
    assert found(None)[0] == "warn" and "SGLang chooses" in found(None)[1]
    state, _, hint = found(None, gib=36)
    assert state == "fail" and "another GPU" in hint and "copy_pinned" in hint


@pytest.mark.parametrize(
    ("sections", "shared"),
    [
        ({}, True),
        ({"trainer": TrainerConfig(gpu=1)}, False),
        ({"trainer": TrainerConfig(gpu=1, ranks=2)}, False),
        ({"engine": EngineConfig(kind="sglang", sglang=replace(ON_ONE, gpus=(1,)))}, False),
        ({"engine": EngineConfig(kind="sglang", sglang=replace(ON_ONE, gpus=(1,))), "trainer": TrainerConfig(ranks=2)}, True),
        ({"engine": EngineConfig(kind="sglang", sglang=replace(ON_ONE, gpus=()))}, True),
        ({"engine": EngineConfig(kind="sglang", sglang=replace(ON_ONE, gpus=(2, 1)))}, False),
        ({"engine": EngineConfig(kind="sglang", workers=0, sglang=ON_ONE)}, False),
        ({"engine": EngineConfig(kind="sglang", workers=0, sglang=ON_ONE), "evaluation": EvaluationConfig(engines=1)}, True),
        ({"engine": EngineConfig()}, False),
        ({"ray": RayConfig(address="local")}, False),
    ],
)
def test_which_engines_are_beside_the_trainer(tmp_path: Path, sections: dict[str, Any], shared: bool) -> None:
    given: dict[str, Any] = {"engine": EngineConfig(kind="sglang", sglang=ON_ONE), **sections}
    config = Config(model=written(tmp_path, QWEN_1_7B), **given)
    assert (reckoning.check_shared_gpus(config, 141 << 30) is not None) == shared


def test_the_least_of_the_trainers_gpus_counts() -> None:
    def least(**sections: Any) -> int:
        return reckoning.least_memory(Config(**sections), [5, 9, 7])

    assert least() == 5
    assert least(trainer=TrainerConfig(gpu=1, ranks=2)) == 7
    assert least(trainer=TrainerConfig(gpu=9)) == 0
    assert least(trainer=TrainerConfig(device="cpu")) == 0
    assert least(ray=RayConfig(address="local")) == 5
    assert least(ray=RayConfig(address="auto")) == 0, "its nodes may have others"
    assert reckoning.check_gpu_memory(Config(), 5 << 30) == [], "a model that is built is small"


@pytest.mark.process
async def test_gpus_are_asked_of_torch_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await reckoning.gpu_memories([str(tmp_path / "none")]) == []
    assert all(nbytes > GIB for nbytes in await reckoning.gpu_memories([str(tmp_path)]))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(reckoning.sys, "executable", str(broken))
    with pytest.raises(LaunchError, match="no such library"):
        await reckoning.gpu_memories([str(tmp_path)])


@pytest.mark.parametrize("cuts", [{}, {"tensor": 2}, {"pipeline": 3}, {"tensor": 4, "pipeline": 2}, {"experts": 4}], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_of_megatron_is_reckoned_by_what_it_holds(tmp_path: Path, cuts: dict[str, int], tied: bool) -> None:
    """Beside the parameters that `names` gives the rank of the mesh that has most."""
    experts = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
    model = written(tmp_path, {"model_type": "qwen3", **QWEN_4B, "tie_word_embeddings": tied, **(experts if "experts" in cuts else {})})
    ranks = math.prod(cuts.values())
    config = Config(model=model, trainer=TrainerConfig(backend="megatron", ranks=ranks, **cuts), weights=WeightsConfig(ring=1))  # pyright: ignore[reportArgumentType]
    arch = architecture(json.loads((tmp_path / "config.json").read_text()), "config.json")
    tensors, stages, parts = (cuts.get(key, 1) for key in ("tensor", "pipeline", "experts"))
    places = [
        Place(tensor=tensor, tensors=tensors, stage=stage, stages=stages, replica=replica, expert_parts=parts)
        for tensor in range(tensors)
        for stage in range(stages)
        for replica in range(parts)
    ]
    held, headless = (
        [sum(math.prod(part.held) for one in parameters(arch, place, headless=cut) for part in one.parts) for place in places]
        for cut in (False, True)
    )
    found = lasting(config)
    assert found["to train the policy"] * GIB == pytest.approx(18 * max(held), rel=2e-3)  # norms are not reckoned
    taught = lasting(replace(config, loss=LossConfig(advantage="ppo")))
    assert taught.pop("to train the critic") * GIB == pytest.approx(18 * max(headless), rel=2e-3)
    assert taught == found
    assert ("of rows to publish of columns" in found) == (tensors > 1)
    looked_at = lasting(replace(config, loss=LossConfig(kl=KLConfig(loss_coef=0.1))))
    assert looked_at["for the reference"] * GIB == pytest.approx(2 * max(held), rel=2e-3)


def test_a_pass_of_megatrons_critic_counts_where_it_is_the_larger_one(tmp_path: Path) -> None:
    small, large = written(tmp_path / "small", QWEN_1_7B), written(tmp_path / "large")

    def token(model: ModelConfig, critic: ModelConfig, **trainer: Any) -> int:
        loss = LossConfig(advantage="ppo", critic=CriticConfig(path=critic.path))
        config = Config(model=model, loss=loss, trainer=TrainerConfig(backend="megatron", **trainer))
        models = models_of(config, reckoning.read_shape)
        assert models is not None
        return rank_memory(config, models, gpu_bytes=140 << 30, compiled=True).token

    assert token(small, large) == token(large, small) == token(large, large) > token(small, small)
    kept = {activations: token(small, large, activations=activations) for activations in ("auto", 0, 30, "all")}
    assert kept["auto"] == kept[0] == token(small, large) < kept[30] < kept["all"]
    # A stage has half of the layers, and the first of two as many rows on their way. `compiled` is said above.
    whole = token(small, large, activations="all")
    assert token(small, large, ranks=2, tensor=2, activations="all") == pytest.approx(whole / 2, rel=1e-3)
    assert token(small, large, ranks=2, pipeline=2, activations="all") == pytest.approx(whole, rel=1e-3)


def test_a_policy_too_large_for_a_rank_of_megatron_is_refused_with_the_tensor_ranks_that_fit(tmp_path: Path) -> None:
    config = Config(model=written(tmp_path), trainer=TrainerConfig(backend="megatron"), weights=WeightsConfig(ring=1))
    alone = reckoning.check_trainer_memory(config, 60 << 30)
    assert alone is not None and alone.state == "fail" and alone.hint.startswith("trainer.tensor = 2,"), alone
    for cut in ({"tensor": 2}, {"pipeline": 2}):
        found = reckoning.check_trainer_memory(replace(config, trainer=replace(config.trainer, ranks=2, **cut)), 60 << 30)
        assert found is not None and found.state == "ok", found
    enough, less = (reckoning.check_activations(config, gib << 30) for gib in (160, 100))
    assert enough is not None and enough.state == "ok" and enough.found.startswith("36 of 36 layers")
    assert less is not None and less.state == "ok" and not less.found.startswith("36 of 36 layers")
    long = replace(config, data=replace(config.data, max_prompt_tokens=60_000))
    assert (found := reckoning.check_trainer_memory(long, 140 << 30)) is not None and found.state == "ok", "no layer keeps its activations"
    refused = reckoning.check_trainer_memory(replace(long, trainer=replace(long.trainer, activations="all")), 140 << 30)
    assert refused is not None and refused.state == "fail" and "trainer.context = " in refused.hint, refused


def test_a_mesh_that_the_model_does_not_divide_is_never_advised(tmp_path: Path) -> None:
    """70B on 8 x 2 ranks of 80 GB needs twice as many: 8 heads of keys and values go no further, so it takes stages."""
    llama = {"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    model = written(tmp_path, {**llama, "intermediate_size": 28_672, "vocab_size": 128_256})
    trainer = TrainerConfig(backend="megatron", ranks=16, tensor=8, pipeline=2)
    config = Config(model=model, trainer=trainer, weights=WeightsConfig(ring=1))
    found = reckoning.check_trainer_memory(config, 79 << 30)
    assert found is not None and found.state == "fail"
    assert "trainer.pipeline = 4, with trainer.ranks" in found.hint
    advised = reckoning.check_trainer_memory(replace(config, trainer=replace(trainer, ranks=32, pipeline=4)), 79 << 30)
    assert advised is not None and advised.state == "ok"
    assert divides(replace(config, trainer=replace(trainer, ranks=32, pipeline=4)))
    assert not divides(replace(config, trainer=replace(trainer, ranks=32, tensor=16)))
