import json
from pathlib import Path

from streamrl.config import tree
from streamrl.config.tree import Config, DebugConfig, TasksConfig
from streamrl.schemas.tasks import Sampling

REWARD = "def reward(task, episode):\n    return float(len(episode.completion) % 3)\n"


def table_config(tmp_path: Path, run_id: str, *, steps: int, tasks: TasksConfig, debug: DebugConfig) -> Config:
    """A run of the table backend whose parameters change with every step."""
    problems = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(problem) + "\n" for problem in problems))
    (tmp_path / "reward.py").write_text(REWARD)
    return Config(
        run=tree.RunConfig(name=run_id, steps=steps, seed=3),
        model=tree.ModelConfig(max_len=32),
        data=tree.DataConfig(train=str(tmp_path / "train.jsonl")),
        tasks=tasks,
        sampling=Sampling(max_new_tokens=6),
        producer=tree.ProducerConfig(concurrency=64),
        reward=tree.RewardConfig(kind=f"{tmp_path / 'reward.py'}:reward", children=1),
        engine=tree.EngineConfig(kind="table", slots=128),
        trainer=tree.TrainerConfig(backend="table", optimizer=tree.OptimizerConfig(learning_rate=1e-2)),
        weights=tree.WeightsConfig(transport="bus", keep=8),
        debug=debug,
    )
