"""From a worker's configuration to the parts of a producer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamrl.config.tree import Config
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.engines.channel import ChannelEngine
from streamrl.errors import ConfigError
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.pool import Children, default_count
from streamrl.producers.engine_pool import EnginePool
from streamrl.producers.filtering import FILTER_FORM, KEEP, Filter
from streamrl.producers.functions import is_user_code, make_producer
from streamrl.producers.groups import GroupRunner
from streamrl.producers.protocol import Producer
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


def make_runner(
    worker: Worker, pool: EnginePool, function: str, *, key: str, producer: Producer | None = None, filters: bool = False
) -> GroupRunner:
    """A runner for `producer`, or the one that `function` names, and the run's reward, and with `filters` the run's filter.

    The caller starts and closes it. Raises ConfigError.
    """
    config = worker.config
    tokenizer, _ = policy_tokenizer(worker)
    user_producer, user_reward = producer is None and is_user_code(function), is_user_reward(config.reward)
    runner = GroupRunner(
        producer=producer or (None if user_producer else make_producer(function, key=key)),
        reward=None if user_reward else make_reward(config.reward),
        engine=pool,
        tokenizer=tokenizer,
        options=config.producer.options,
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
        template_kwargs=config.data.chat_template_kwargs,
        tool_calls=config.data.tool_calls,
        children=_children(worker, function if user_producer else "", key) if user_producer or user_reward else None,
        max_deaths=config.tasks.max_deliveries,
        filter=_filter(worker, pool) if filters and config.filters.function else None,
    )
    worker.trouble = lambda: runner.notice
    return runner


def _children(worker: Worker, function: str, key: str) -> Children:
    config = worker.config
    hello = _hello(
        worker,
        function=function,
        function_key=key,
        reward=config.reward.kind if is_user_reward(config.reward) else "",
        reward_options=config.reward.options,
        options=config.producer.options,
    )
    return Children(hello, _limits(config), score_s=config.reward.timeout_s, count=config.producer.children or default_count())


def _filter(worker: Worker, pool: EnginePool) -> Filter:
    config = worker.config
    options = {"function": config.filters.function, "options": config.filters.options}
    hello = _hello(worker, function_key=FILTER_FORM.key, reward=KEEP, reward_options=options)
    children = Children(hello, _limits(config), score_s=config.filters.timeout_s, count=config.producer.children or default_count())
    return Filter(children, engine=pool, max_deaths=config.tasks.max_deliveries)


def _limits(config: Config) -> Limits:
    return Limits(idle_s=config.producer.idle_timeout_s, total_s=config.producer.rollout_timeout_s)


def _hello(worker: Worker, **told: Any) -> Hello:
    config = worker.config
    return Hello(
        model_dir=str(worker.run_dir.policy_dir(config)),
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
        template_kwargs=config.data.chat_template_kwargs,
        tool_calls=config.data.tool_calls,
        memory_bytes=config.producer.child_memory_bytes,
        **told,
    )
