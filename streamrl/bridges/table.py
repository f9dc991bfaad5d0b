"""The bridges are listed here by the prefixes of their references. Nothing of a bridge is imported before a reference names it."""

from __future__ import annotations

from streamrl.config.bridges import Bridge
from streamrl.config.slime import SlimeConfig

_BESIDE_FILTER = ("slime.rollout_sample_filter_path", "slime.rollout_all_samples_process_path")
_LISTS = ("slime.rollout_sample_hook_path",)

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
    Bridge(
        prefixes=("slime:", "slime_group:", "slime_rollout:", "slime_rewards:"),
        adapted="streamrl.bridges.slime.hooks:adapted",
        loss="streamrl.bridges.slime.loss:SlimeLoss",
        options="streamrl.bridges.slime.flags:hook_options",
        section="slime",
        lowered="streamrl.bridges.slime.section:lowered",
        raised="streamrl.bridges.slime.section:raised",
        check_config="streamrl.bridges.slime.section:check_config",
        check_function="streamrl.bridges.slime.contracts:check_section",
        functions=tuple(key for name in SlimeConfig.__struct_fields__ if name.endswith("_path") and (key := f"slime.{name}") not in _LISTS),
        function_lists=_LISTS,
        beside=(*_BESIDE_FILTER, *_LISTS),
        judging=_BESIDE_FILTER,
        of_producers=("slime.custom_generate_function_path", "slime.rollout_function_path", *_LISTS),
        of_trainer=(
            "slime.custom_reward_post_process_path",
            "slime.custom_advantage_function_path",
            "slime.custom_tis_function_path",
            "slime.custom_loss_function_path",
        ),
    ),
)
