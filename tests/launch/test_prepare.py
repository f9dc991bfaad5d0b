from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.config.engines import EngineConfig, SglangConfig
from streamrl.config.load import load
from streamrl.config.tree import Config, TrainerConfig
from streamrl.errors import ConfigError, LaunchError, StreamRLError
from streamrl.launch import prepare
from streamrl.launch.prepare import check_gpus, check_start
from streamrl.runtime.rundir import BRANCH_FILE, RunDir
from tests.support.errors import raises


async def test_no_run_is_trained_in_the_directory_of_a_branch(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "faster")
    run.create()
    (run.path / BRANCH_FILE).write_text("{}")
    with raises(ConfigError, key="run.name", path=str(run.path)):
        await check_start(Config(), run)


def written(tmp_path: Path, **keys: object) -> Config:
    """Load a file that names rows beside it, with a tabular policy, and `keys` over that."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n')
    (tmp_path / "mine.py").write_text("def reward(wrong):\n    return 0.0\n")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text('{"max_position_embeddings": 32}')
    (tmp_path / "short" / "table.json").write_text("{}")
    (tmp_path / "my.toml").write_text('[data]\ntrain = "rows.jsonl"\n[engine]\nkind = "table"\n[trainer]\nbackend = "table"\n')
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in keys.items()]
    return load(tmp_path / "my.toml", [one.replace("DIR", str(tmp_path)) for one in overrides])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"data__prompt_key": "question"},
        {"data__max_prompt_tokens": 1, "data__reading": "whole"},
        {"model__path": "DIR/short"},
        {"sampling__logit_bias": "{100000=1.0}"},
        pytest.param({"reward__kind": "DIR/mine.py:reward"}, marks=pytest.mark.process),
        pytest.param({"producer__function": "DIR/mine.py:nobody"}, marks=pytest.mark.process),
    ],
)
async def test_the_doctor_refuses_what_a_start_refuses_and_nothing_else(tmp_path: Path, keys: dict[str, object]) -> None:
    config = written(tmp_path, **keys)
    run = RunDir(tmp_path / "runs" / "demo")
    run.create()
    check = await prepare.rehearse(config)
    if not keys:
        assert (check.state, (await prepare.prepare(config, run)).num_rows) == ("ok", 0)
        return
    with pytest.raises(StreamRLError) as caught:
        await prepare.prepare(config, run)
    assert (check.state, check.hint) == ("fail", caught.value.hint)
    assert check.found.split()[:6] == caught.value.message.split()[:6], "but for where the model was built"


async def test_a_run_whose_checkpoints_do_not_fit_the_disk_does_not_start(tmp_path: Path) -> None:
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
