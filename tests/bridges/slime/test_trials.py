"""Each hook is called with slime's signature by the seam that it stands at, and what is wrong with one is said."""

import re
from pathlib import Path
from typing import Any

import pytest

from streamrl.bridges.slime.contracts import Asked, check_hook
from streamrl.bridges.slime.trials import run_trial
from streamrl.errors import ConfigError, SchemaError, StreamRLError


def tried(flag: str, file: Path, name: str, **more: Any) -> list[str]:
    reference = f"{file}:{name}"
    check_hook(flag, reference, key=flag)
    return run_trial(Asked(flag, reference, **more))


@pytest.mark.parametrize(
    ("flag", "name", "more", "words"),
    [
        ("custom_generate_function_path", "two_turns", {}, "trained, completed"),
        ("custom_generate_function_path", "fan_out", {}, "reward 0.25"),
        ("rollout_sample_hook_path", "mask_first", {}, "1 trained"),
        ("rollout_sample_hook_path", "looks", {}, "2 trained"),
        ("rollout_sample_hook_path", "removes", {}, "rollout 1: no sample, so it ends as filtered"),
        ("rollout_sample_hook_path", "wants_both", {}, "2 trained"),
        ("custom_generate_function_path", "wants_evaluation", {}, "2 trained"),
        ("custom_tis_function_path", "by_name", {}, "train/ois, train/ones"),
        ("rollout_function_path", "whole_rollout", {}, "rollout 1: '3', 9 tokens, 2 trained, completed, reward 1.0"),
        ("custom_rm_path", "rm", {}, "response '2', label '2': 1.0"),
        ("custom_rm_path", "rm", {"options": {"bonus": 0.5}}, "response '3', label '2': 0.5"),
        ("custom_rm_path", "table_rm", {"reward_key": "score"}, "{'score': 1.0}"),
        ("custom_rm_path", "ranks", {"group": True}, "response '3', label '2': 0.75"),
        ("dynamic_sampling_filter_path", "spread", {}, "rewards [0.0, 0.0, 0.0, 0.0]: keeps rollouts none (filter: zero_std_0.0)"),
        ("rollout_sample_filter_path", "mark_wrong", {}, "keeps rollouts 0, 2 (filter: remove_sample)"),
        ("custom_loss_function_path", "two_losses", {}, "looked at and not called"),
    ],
)
def test_what_fits_is_called_and_its_answer_shown(hooks: Path, flag: str, name: str, more: dict[str, Any], words: str) -> None:
    hooks.write_text(hooks.read_text() + "\n\ndef two_losses(args, batch, logits, sum_of_sample_mean):\n    return 0.0, {}\n")
    assert words in "\n".join(tried(flag, hooks, name, **more))


@pytest.mark.parametrize(
    ("flag", "name", "error", "words"),
    [
        ("custom_rm_path", "one_argument", ConfigError, "too many positional arguments"),
        ("custom_rm_path", "plain_rm", ConfigError, "expected `async def`, got a plain function"),
        ("custom_rm_path", "rmm", ConfigError, "called 'rmm'"),
        ("custom_rm_path", "nan_rm", SchemaError, "must be finite, got value = nan"),
        ("custom_rm_path", "text_rm", SchemaError, "got '1.0'"),
        ("custom_rm_path", "table_rm", SchemaError, "reward.key does not say which part"),
        ("custom_rm_path", "exits", SystemExit, "3"),
        ("custom_rm_path", "asks_too_much", AttributeError, "no 'tensor_model_parallel_size' here"),
        ("custom_generate_function_path", "rm", ConfigError, "too many positional arguments"),
        ("custom_generate_function_path", "text_back", SchemaError, "return a Sample or a list of them, got str"),
        ("custom_generate_function_path", "makes_up", SchemaError, "token 1 of the response has loss mask 1"),
        ("custom_generate_function_path", "gives_up", SchemaError, "came back ABORTED"),
        ("dynamic_sampling_filter_path", "rm", ConfigError, "expected a plain function, got `async def`"),
        ("dynamic_sampling_filter_path", "forgets", SchemaError, "got None"),
        ("rollout_all_samples_process_path", "show", SchemaError, "no samples are to be had here"),
        ("rollout_sample_hook_path", "one_argument", ConfigError, "too many positional arguments"),
        ("custom_reward_post_process_path", "reads_text", ConfigError, "sample.response is not there in the trainer"),
        ("custom_reward_post_process_path", "forgets", ConfigError, "got None"),
        ("custom_advantage_function_path", "truncated", ConfigError, "pg_loss"),
        ("custom_advantage_function_path", "no_advantages", ConfigError, "got none"),
        ("custom_tis_function_path", "one_mask", ConfigError, "masks of"),
        ("custom_tis_function_path", "loss_alone", ConfigError, "to return (pg_loss, masks, metrics)"),
        ("custom_reward_post_process_path", "two_numbers", ConfigError, "a number for each of 4 samples, got (1.0, 0.0)"),
    ],
)
def test_what_does_not_fit_is_said_in_words(hooks: Path, flag: str, name: str, error: type[BaseException], words: str) -> None:
    with pytest.raises(error, match=re.escape(words)) as caught:
        tried(flag, hooks, name)
    if isinstance(caught.value, StreamRLError):
        assert caught.value.hint


def test_the_pages_function_is_called(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "slime-hooks.md").read_text()
    (tmp_path / "page.py").write_text(page.split("```python\n")[1].split("```")[0])
    assert "2 trained, completed" in tried("custom_generate_function_path", tmp_path / "page.py", "generate")[0]


def test_a_group_reward_of_another_length_is_said(hooks: Path) -> None:
    with pytest.raises(SchemaError, match=r"a list of 4 .*got 1 values"):
        tried("custom_rm_path", hooks, "short_group", group=True)
