"""What a run whose rollouts are a taskset's of verifiers may not say."""

from __future__ import annotations

from streamrl.config.environments import VERIFIERS
from streamrl.config.tree import Config, refuse


def check_verifiers(config: Config) -> None:
    """Raise ConfigError for the first rule of `producer.function = "verifiers:..."` that does not hold."""
    if not config.producer.function.startswith(VERIFIERS):
        return
    data = config.data
    rules = (
        ("producer.python", not config.producer.python, "name the interpreter that has verifiers: `make verifiers` makes .venv-verifiers"),
        ("gateway.workers", config.gateway.workers == 0, "set gateway.workers = 1: a taskset's rollouts are sessions at a gateway"),
        ("data.train", not data.train, 'name the file that the rows are written to, such as "tasks.jsonl"'),
        ("data.heldout", bool(data.heldout), "leave it out: held-out tasks are not evaluated by tasksets"),
        ("data.metadata_key", not data.metadata_key, 'set data.metadata_key = "metadata", where a row names its task'),
        ("data.label_key", bool(data.label_key), 'set data.label_key = "": the taskset has the answers'),
        ("data.chat_template", not data.chat_template, "leave it out: verifiers sends chat messages"),
        ("ray.address", bool(config.ray.address), "leave it out: a taskset's processes find the gateway by the run's directory"),
    )
    for key, broken, hint in rules:
        refuse(broken, f"producer.function = {config.producer.function!r} does not go with this value of {key}", hint=hint, key=key)
