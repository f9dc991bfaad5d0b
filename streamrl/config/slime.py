"""The section `slime`, which `streamrl/bridges/slime/section.py` translates to streamrl's own keys."""

from __future__ import annotations

from typing import Any

from streamrl.config.bounds import Section


class SlimeConfig(Section, frozen=True, kw_only=True):
    """Functions written for slime, as `file.py:name`, `pkg.mod:name` or `pkg.mod.name` (docs/slime-hooks.md has their signatures)."""

    custom_generate_function_path: str = ""
    """Makes the samples of a rollout; becomes `producer.function`."""
    rollout_function_path: str = ""
    """Rolls a task out and may score it; becomes `producer.function`."""
    rollout_sample_hook_path: tuple[str, ...] = ()
    """Look at each sample between its generation and its reward, one after the other."""
    custom_rm_path: str = ""
    """Scores a sample, or with group_rm a group; becomes `reward.kind`."""
    group_rm: bool = False
    """Whether custom_rm_path is called with all samples of a group."""
    dynamic_sampling_filter_path: str = ""
    """Says which groups are kept; becomes `filters.function`, as do the next two."""
    rollout_sample_filter_path: str = ""
    """Sets `remove_sample` of samples that are not to be trained."""
    rollout_all_samples_process_path: str = ""
    """Is shown every group, kept or not."""
    custom_reward_post_process_path: str = ""
    """Processes the rewards of a batch, in place of their normalization; becomes `loss.advantage`."""
    custom_advantage_function_path: str = ""
    """Computes advantages; becomes `loss.advantage`."""
    custom_tis_function_path: str = ""
    """Corrects the policy loss for the distance of sampler and trainer; becomes `loss.policy`."""
    custom_loss_function_path: str = ""
    """Becomes `loss.slime_loss`."""
    custom_config: dict[str, Any] = {}
    """Values of your own in `args`, which slime reads from the file of --custom-config-path; not in that of hooks of the trainer."""
