from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.tree import Config, TrainerConfig
from streamrl.errors import ConfigError, LaunchError
from streamrl.launch import prepare
from streamrl.launch.prepare import check_gpus, check_start
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from tests.support.errors import raises


async def test_no_run_starts_in_a_branch_or_without_room(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "faster")
    run.create()
    (run.path / BRANCH_FILE).write_text("{}")
    with raises(ConfigError, key="run.name", path=str(run.path)):
        await check_start(Config(), run)
    described = {"num_attention_heads": 1, "hidden_size": 1 << 20, "intermediate_size": 1, "num_hidden_layers": 1, "vocab_size": 1 << 40}
    (tmp_path / "config.json").write_text(json.dumps(described))
    config = Config(run=replace(Config().run, dir=str(tmp_path / "runs")))
    with pytest.raises(LaunchError, match="two checkpoints") as caught:
        await check_start(replace(config, model=replace(config.model, path=str(tmp_path))), RunDir(tmp_path / "runs" / "demo"))
    assert "run.dir" in caught.value.hint


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of 80 GiB, whatever this machine has."""

    async def gpu_memories() -> list[int]:
        return [80 << 30]

    monkeypatch.setattr(prepare, "gpu_memories", gpu_memories)


@pytest.fixture
def model_2b(tmp_path: Path) -> Config:
    """A model of 1.9 billion parameters in bfloat16, beside SGLang on the first GPU."""
    described = {"num_attention_heads": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 26, "vocab_size": 32_000}
    (tmp_path / "config.json").write_text(json.dumps(described))
    engine = EngineConfig(kind="sglang", sglang=SglangConfig(flags={"mem_fraction_static": 0.4}))
    return replace(Config(), engine=engine, model=replace(Config().model, path=str(tmp_path), dtype="bfloat16"))


@pytest.mark.usefixtures("one_gpu")
async def test_a_trainer_that_does_not_fit_its_gpus_does_not_start(model_2b: Config) -> None:
    notes: list[str] = []
    await check_gpus(model_2b, notes.append)
    assert len(notes) == 1 and "one GPU of 80.0 GiB" in notes[0]
    for trainer, sampled, said in (
        (TrainerConfig(ranks=2, shards=2), 64, r"2, of 1 that torch sees \(trainer.gpu = 0, trainer.ranks = 2\)"),
        (TrainerConfig(check_logprobs=1), 10_000_000, "a rank takes .* for a sample of 10000128 tokens"),
    ):
        config = replace(model_2b, trainer=trainer, sampling=replace(model_2b.sampling, max_new_tokens=sampled))
        config = replace(config, tasks=replace(config.tasks, max_staleness=3))
        with pytest.raises(LaunchError, match=said) as caught:
            await check_gpus(config, notes.append)
        assert caught.value.hint
        await check_gpus(replace(config, trainer=replace(trainer, device="cpu"), engine=EngineConfig()), notes.append)
    tight = replace(model_2b, trainer=TrainerConfig(check_logprobs=1), tasks=replace(model_2b.tasks, max_staleness=3))
    await check_gpus(tight, notes.append)
    assert "trainer.check_logprobs" in notes[-1] and "set engine.sglang" in notes[-1]
    little = replace(model_2b.engine, sglang=replace(model_2b.engine.sglang, flags={"mem_fraction_static": 0.02}))
    with pytest.raises(LaunchError, match="too little for its weights"):
        await check_gpus(replace(model_2b, engine=little), notes.append)


async def test_without_a_gpu_nothing_is_refused_but_a_gpu_that_is_named(model_2b: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none() -> list[int]:
        return []

    monkeypatch.setattr(prepare, "gpu_memories", none)
    await check_gpus(replace(model_2b, trainer=TrainerConfig(ranks=2, shards=2)), pytest.fail)
    with pytest.raises(LaunchError, match="1, of 0 that torch sees"):
        await check_gpus(replace(model_2b, trainer=TrainerConfig(device="cuda")), pytest.fail)
