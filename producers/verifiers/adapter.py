"""`verifiers:NAME` as one of the environments that `producer.function` names: looked at before the start, and never run by a child."""

from __future__ import annotations

import asyncio

from streamrl.config.tree import ProducerConfig
from streamrl.errors import ConfigError, LaunchError
from streamrl.producers.verifiers.guests import INSTALL, LAST_WORDS_S, Spec, guest, wrong


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
