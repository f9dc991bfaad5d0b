import json
from pathlib import Path

from streamrl.config.tree import (
    Config,
    DataConfig,
    DebugConfig,
    EngineConfig,
    ModelConfig,
    OptimizerConfig,
    ProducerConfig,
    RewardConfig,
    RunConfig,
    TasksConfig,
    TrainerConfig,
    WeightsConfig,
)
from streamrl.schemas.tasks import Sampling

REWARD = "def reward(task, episode):\n    return float(len(episode.completion) % 3)\n"


def table_config(tmp_path: Path, run_id: str, *, steps: int, tasks: TasksConfig, debug: DebugConfig) -> Config:
    """A run of the table backend whose parameters change with every step."""
    problems = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (tmp_path / "reward.py").write_text(REWARD)
    return Config(
        run=RunConfig(name=run_id, steps=steps, seed=3),
        model=ModelConfig(max_len=32),
        data=DataConfig(train=str(tmp_path / "train.jsonl")),
        tasks=tasks,
        sampling=Sampling(max_new_tokens=6),
        producer=ProducerConfig(concurrency=64),
        reward=RewardConfig(kind=f"{tmp_path / 'reward.py'}:reward", children=1),
        engine=EngineConfig(kind="table", slots=128),
        trainer=TrainerConfig(backend="table", optimizer=OptimizerConfig(learning_rate=1e-2)),
        weights=WeightsConfig(transport="bus", keep=8),
        debug=debug,
    )
