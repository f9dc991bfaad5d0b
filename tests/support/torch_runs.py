"""Small runs of the torch backend."""

import json
from pathlib import Path

from msgspec.structs import replace

from streamrl.config import tree
from streamrl.config.loss import CriticConfig, KLConfig, LossConfig
from streamrl.schemas.tasks import Sampling

REWARD = "def share_of_letters(task, episode):\n    return sum(c.isalpha() for c in episode.completion) / 8\n"


def ppo_config(base: Path) -> tree.Config:
    """With a critic and a reference."""
    rows = [{"prompt": f"{a}+{b}=", "label": str(a + b)} for a in range(6) for b in range(5)]
    (base / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (base / "reward.py").write_text(REWARD)
    critic = CriticConfig(learning_rate=1e-3, only_steps=1)
    return tree.Config(
        run=tree.RunConfig(name="parent", steps=6, seed=3, numerics="bitwise"),
        model=tree.ModelConfig(hidden=32, layers=1, heads=2, kv_heads=1, intermediate=48, max_len=32),
        data=tree.DataConfig(train=str(base / "train.jsonl"), max_prompt_tokens=16),
        tasks=tree.TasksConfig(batch_tasks=4, num_rollouts=1, max_staleness=1, drop_zero_variance=False),
        sampling=Sampling(max_new_tokens=6),
        reward=tree.RewardConfig(kind=f"{base / 'reward.py'}:share_of_letters", children=1),
        engine=tree.EngineConfig(slots=8),
        trainer=tree.TrainerConfig(checkpoint_every=2, minibatches=2, keep_checkpoints=100),
        loss=LossConfig(advantage="ppo", gae_lambda=0.95, kl=KLConfig(reward_coef=0.01), critic=critic),
    )


def limited(base: Path, memory_tokens: int) -> tree.Config:
    """Without a critic, on a device that is out of memory above so many tokens; 0: never."""
    config = ppo_config(base)
    return replace(
        config,
        run=replace(config.run, name="halved", steps=6, numerics="bitwise"),
        tasks=replace(config.tasks, num_rollouts=2),
        trainer=replace(config.trainer, checkpoint_every=3, minibatches=1, micro_tokens=64, activations=0),
        loss=LossConfig(),
        debug=tree.DebugConfig(memory_tokens=memory_tokens),
    )
