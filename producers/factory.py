"""From a worker's configuration to the parts of a producer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamrl.config.bridges import with_options
from streamrl.config.tree import Config
from streamrl.data.tokenizer import Tokenizer, load_tokenizer
from streamrl.engines.channel import ChannelEngine
from streamrl.engines.protocol import Engine
from streamrl.producers.children.calls import Limits
from streamrl.producers.children.crew import default_count
from streamrl.producers.children.frames import Hello
from streamrl.producers.children.graders import Scoring
from streamrl.producers.children.pool import Children
from streamrl.producers.engine_pool import EnginePool
from streamrl.producers.filtering import FILTER_FORM, KEEP, Filter
from streamrl.producers.functions import is_user_code, make_producer
from streamrl.producers.groups import GroupRunner
from streamrl.producers.protocol import Producer
from streamrl.rewards.factory import make_reward, runs_in_children
from streamrl.schemas.control import ROLLOUT_ROLE, EnginePresence

TOKENS_OF_MAX_LEN = 32
"""Default of producer.max_tokens, in longest sequences."""

if TYPE_CHECKING:
    from streamrl.runtime.worker import Worker


def policy_tokenizer(worker: Worker) -> tuple[Tokenizer, int]:
    """The policy's tokenizer and the token that ends a turn; raises ConfigError when it has none."""
    tokenizer = load_tokenizer(worker.run_dir.policy_dir(worker.config))
    return tokenizer, tokenizer.end_id


def make_pool(worker: Worker, *, role: str = ROLLOUT_ROLE) -> EnginePool:
    """The engines of the run's policy that have this role, asked over a channel each."""
    token, silent_s = worker.run_dir.engine_token(), worker.config.producer.silent_call_s

    def connect(presence: EnginePresence) -> Engine:
        return ChannelEngine(presence.address, token=token)

    pool = EnginePool(worker.bus.kv, connect, policy="policy", role=role, silent_s=silent_s)
    worker.wait = lambda: pool.wait
    return pool


def make_runner(
    worker: Worker,
    engine: Engine,
    function: str,
    *,
    key: str,
    producer: Producer | None = None,
    scores: bool = True,
    filters: bool = False,
    config: Config | None = None,
) -> GroupRunner:
    """A runner for `producer`, or the one that `function` names, and the run's reward, or those of `config`; raises ConfigError.

    The caller starts and closes it. Without `scores` episodes keep what rewards their producer gave: others give the rest. With `filters`
    the run's filter is asked, if there is one, and rewards must have the parts that `loss.objectives` names.
    """
    config = config or worker.config
    model_dir = worker.run_dir.policy_dir(config)
    runner = runner_of(config, model_dir, engine, function, key=key, producer=producer, scores=scores, filters=filters)
    worker.trouble = lambda: runner.notice
    return runner


def runner_of(
    config: Config,
    model_dir: Path,
    engine: Engine,
    function: str,
    *,
    key: str,
    producer: Producer | None = None,
    scores: bool = True,
    filters: bool = False,
) -> GroupRunner:
    """The same without a worker: `engine` is asked, and `model_dir` has the tokenizer."""
    tokenizer = load_tokenizer(model_dir)
    user_producer = producer is None and is_user_code(function)
    child_reward = scores and runs_in_children(config.reward, by_row=bool(config.data.reward_key))
    return GroupRunner(
        producer=producer or (None if user_producer else make_producer(function, key=key)),
        reward=None if child_reward or not scores else make_reward(config.reward),
        engine=engine,
        tokenizer=tokenizer,
        options=config.producer.options,
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
        template_kwargs=config.data.chat_template_kwargs,
        tool_calls=config.data.tool_calls,
        children=_children(config, model_dir, function if user_producer else "", key, child_reward)
        if user_producer or child_reward
        else None,
        max_deaths=config.tasks.max_deliveries,
        filter=_filter(config, model_dir, engine) if filters and config.filters.function else None,
        objectives=tuple(config.loss.objectives) if filters else (),
    )


def _children(config: Config, model_dir: Path, function: str, key: str, scores: bool) -> Children:
    hello = _hello(
        config,
        model_dir,
        function=function,
        function_key=key,
        reward=config.reward.kind if scores else "",
        reward_options=with_options(config, model_dir, config.reward.kind, config.reward.options),
        reward_key=config.reward.key,
        by_row=config.data.reward_options if config.data.reward_key else None,
        options=with_options(config, model_dir, function, config.producer.options),
    )
    return Children(hello, _limits(config), count=config.producer.children or default_count(), scoring=Scoring.of(config.reward))


def _filter(config: Config, model_dir: Path, engine: Engine) -> Filter:
    options = {
        "function": config.filters.function,
        "options": with_options(config, model_dir, config.filters.function, config.filters.options),
    }
    hello = _hello(config, model_dir, function_key=FILTER_FORM.key, reward=KEEP, reward_options=options)
    scoring = Scoring(timeout_s=config.filters.timeout_s)
    children = Children(hello, _limits(config), count=config.producer.children or default_count(), scoring=scoring)
    return Filter(children, engine=engine, max_deaths=config.tasks.max_deliveries)


def _limits(config: Config) -> Limits:
    producer = config.producer
    most = producer.max_tokens or TOKENS_OF_MAX_LEN * config.model.max_len
    return Limits(idle_s=producer.idle_timeout_s, total_s=producer.rollout_timeout_s, max_calls=producer.max_calls, max_tokens=most)


def _hello(config: Config, model_dir: Path, **told: Any) -> Hello:
    return Hello(
        model_dir=str(model_dir),
        max_len=config.model.max_len,
        chat_template=config.data.chat_template,
        template_kwargs=config.data.chat_template_kwargs,
        tool_calls=config.data.tool_calls,
        memory_bytes=config.producer.child_memory_bytes,
        **told,
    )
