"""G8: lockstep (S = 0) over the stream trains what a plain synchronous loop trains, digest for digest."""

import json
import string
from pathlib import Path
from typing import Any

import pytest

from streamrl.bus.protocol import Bus
from streamrl.config import tree
from streamrl.core.batches import TrainBatch
from streamrl.core.seeds import rollout_seed, run_seed, task_seed
from streamrl.data.model import ensure_model
from streamrl.data.order import row_of
from streamrl.data.problems import load_problems
from streamrl.data.tokenizer import load_tokenizer
from streamrl.engines.factory import make_engine
from streamrl.engines.protocol import GenerateRequest
from streamrl.schemas.tasks import Sampling
from streamrl.schemas.versions import Version
from streamrl.trainers.factory import make_trainer
from streamrl.weights.manifest import Content, build
from streamrl.weights.protocol import Part
from tests.support.harness import make_run, read_ledger, run_to_end
from tests.support.models import ask
from tests.support.wanted import filled

REWARD = "def share_of_letters(task, episode):\n    return sum(c.isalpha() for c in episode.completion) / 8\n"


def lockstep_config(tmp_path: Path, run_id: str, backend: str) -> tree.Config:
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    table = backend == "table"
    return tree.Config(
        run=tree.RunConfig(name=run_id, steps=5, seed=3, numerics="bitwise"),
        model=tree.ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, max_len=32),
        data=tree.DataConfig(train=str(tmp_path / "train.jsonl")),
        tasks=tree.TasksConfig(batch_tasks=4, num_rollouts=4, max_staleness=0, drop_zero_variance=False),
        sampling=Sampling(max_new_tokens=6),
        producer=tree.ProducerConfig(concurrency=3),
        reward=tree.RewardConfig(kind=f"{tmp_path / 'reward.py'}:share_of_letters", children=1),
        engine=tree.EngineConfig(kind="table" if table else "local", deterministic=True, slots=5),
        trainer=tree.TrainerConfig(backend="table" if table else "torch", checkpoint_every=2),
    )


async def plain_loop(config: tree.Config, model_dir: Path) -> list[str]:
    """The whole algorithm without a stream: generate, score, train, hand the weights over, repeat. Returns a digest per step."""
    tokenizer = load_tokenizer(model_dir)
    problems = load_problems(config.data.train, config.data, tokenizer)
    seed = run_seed(config.run.name, config.run.seed)
    trainer = make_trainer(config, model_dir)
    engine = make_engine(config.engine, model_dir, engine_id="plain", max_len=config.model.max_len)
    await engine.start()
    digests: list[str] = []
    for step in range(config.run.steps):
        shards = list(trainer.shards())
        content = Content(shards)
        manifest = build(content, run="plain", policy="policy", version=Version(0, step), parts=(), transport="shm")

        async def whole(data: bytes = filled(content).tobytes()):
            yield Part(0, memoryview(data))

        await engine.stage(manifest, whole())
        await engine.commit(Version(0, step))
        rows: list[tuple[Any, ...]] = []
        for task in range(step * config.tasks.batch_tasks, (step + 1) * config.tasks.batch_tasks):
            problem = problems[row_of(config.run.seed, task, len(problems))[1]]
            for rollout in range(config.tasks.num_rollouts):
                seeds, name = (rollout_seed(task_seed(seed, task), rollout),), f"{task}-{rollout}"
                request = GenerateRequest(request_id=name, prompt_ids=problem.prompt_ids, sampling=config.sampling, seeds=seeds)
                [answer] = await ask(engine, request)
                text = tokenizer.decode(answer.ids[:-1] if answer.reason == "stop" else answer.ids)
                reward = sum(c in string.ascii_letters for c in text) / 8
                rows.append((problem.prompt_ids, answer.ids, answer.logprobs, reward, task))
        prompts, answers, logprobs, rewards, tasks = map(list, zip(*rows, strict=True))
        batch = TrainBatch.from_lists(
            prompts, answers, sampler_logprobs=logprobs, rewards=rewards, tasks=tasks, version=Version(0, step), stage_step=step
        )
        digests.append(trainer.step(batch).digest)
    await engine.stop()
    return digests


@pytest.mark.process
@pytest.mark.parametrize(
    ("make_bus", "backend"), [("memory", "torch"), pytest.param("nats", "table", marks=pytest.mark.nats)], indirect=["make_bus"]
)
async def test_lockstep_equals_a_plain_synchronous_loop(tmp_path: Path, bus: Bus, run_id: str, backend: str) -> None:
    config = lockstep_config(tmp_path, run_id, backend)
    run, config = make_run(tmp_path, config)
    model_dir = ensure_model(config, run.model_dir)
    expected = await plain_loop(config, model_dir)
    await run_to_end(config, run, bus)
    entries = await read_ledger(bus, config.run.name)
    assert len(set(expected)) == config.run.steps, "every step must have changed the weights"
    assert [entry.digest for entry in entries] == expected
    assert all(age == 0 for entry in entries for age in entry.staleness)
