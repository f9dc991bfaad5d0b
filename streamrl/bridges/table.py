"""The bridges by the prefixes of references, for the rest of the house: nothing of a bridge is imported before it is named."""

from __future__ import annotations

from streamrl.config.bridges import Bridge
from streamrl.config.slime import GROUP, REWARDS, ROLLOUT, SLIME

BRIDGES = (
    Bridge(prefixes=("openenv:",), check="streamrl.bridges.openenv:check", producer="streamrl.bridges.openenv:producer"),
    Bridge(prefixes=("skyrl_gym:",), check="streamrl.bridges.skyrl_gym:check", producer="streamrl.bridges.skyrl_gym:producer"),
    Bridge(
        prefixes=("verifiers:",),
        check="streamrl.bridges.verifiers.adapter:check",
        producer="streamrl.bridges.verifiers.adapter:producer",
        play="streamrl.bridges.verifiers.worker:main",
        write_rows="streamrl.bridges.verifiers.rows:write_rows",
        check_config="streamrl.bridges.verifiers.adapter:check_config",
    ),
    Bridge(prefixes=(SLIME, GROUP, ROLLOUT, REWARDS), adapted="streamrl.bridges.slime.hooks:adapted"),
)
