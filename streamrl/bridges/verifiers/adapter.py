"""`verifiers:NAME` as one of the environments that `producer.function` names: looked at before the start, and never run by a child."""

from __future__ import annotations

import asyncio

from streamrl.bridges.verifiers.guests import INSTALL, LAST_WORDS_S, Spec, guest, wrong
from streamrl.config.bounds import refuse
from streamrl.config.tree import Config, ProducerConfig
from streamrl.errors import ConfigError, LaunchError


def check(name: str, section: ProducerConfig) -> None:
    """Raise ConfigError unless the interpreter has verifiers 0.4, and the taskset loads there with these options."""
    asyncio.run(_check(name, section))


async def _check(name: str, section: ProducerConfig) -> None:
    spec = Spec(mode="check", taskset=name, options=section.options)
    async with guest(section.python, spec) as running:
        async for said in running.lines():
            if said.error:
                raise wrong(said, name)
            if said.done:
                return
        code = await running.end(patience_s=LAST_WORDS_S)
    raise ConfigError(
        f"expected producer.python = {section.python!r} to run verifiers, its process ended with exit code {code}",
        hint=INSTALL,
        key="producer.python",
    )


def producer(name: str) -> object:
    """Refused: sessions at the gateway are the rollouts of a taskset."""
    raise LaunchError(
        f"expected a producer that makes rollouts itself, got verifiers:{name}, whose rollouts are sessions at the run's gateway",
        hint="name it as producer.function of the run; streamrl attach cannot join with it",
    )


def check_config(config: Config) -> None:
    """Raise ConfigError for the first rule of `producer.function = "verifiers:..."` that does not hold."""
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
