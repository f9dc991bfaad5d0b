"""From a worker's configuration to the parts of a producer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.engines.channel import ChannelEngine
from streamrl.errors import ConfigError
from streamrl.producers.engine_pool import EnginePool
from streamrl.producers.functions import is_user_code, make_producer
from streamrl.producers.groups import GroupRunner
from streamrl.rewards.factory import is_user_code as is_user_reward
from streamrl.rewards.factory import make_reward
from streamrl.schemas.control import ROLLOUT_ROLE

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker


def policy_tokenizer(worker: Worker) -> tuple[Tokenizer, int]:
    """The policy's tokenizer and the token that ends a turn; raises ConfigError when it has none."""
    path = worker.run_dir.policy_dir(worker.config)
    tokenizer = load_tokenizer(path)
    if not tokenizer.stop_ids:
        raise ConfigError(
            f"expected an end-of-sequence token in the tokenizer at {path}, got none", hint="set eos_token in tokenizer_config.json"
        )
    return tokenizer, tokenizer.stop_ids[0]


def make_pool(worker: Worker, *, role: str = ROLLOUT_ROLE) -> EnginePool:
    """The engines of the run's policy that have this role, asked over a channel each."""
    token = worker.run_dir.engine_token()
    pool = EnginePool(worker.bus.kv, lambda presence: ChannelEngine(presence.address, token=token), policy="policy", role=role)
    worker.wait = lambda: pool.wait
    return pool


def make_runner(worker: Worker, pool: EnginePool, function: str, *, key: str) -> GroupRunner:
    """A runner for the producer that `function` names and the run's reward; raises ConfigError. To be closed by the caller."""
    config = worker.config
    producer, reward = make_producer(function, key=key), make_reward(config.reward)
    tokenizer, _ = policy_tokenizer(worker)
    return GroupRunner(
        producer=producer,
        reward=reward,
        engine=pool,
        tokenizer=tokenizer,
        user_producer=is_user_code(producer),
        user_reward=is_user_reward(config.reward),
        options=config.producer.options,
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
    )
