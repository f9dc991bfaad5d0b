"""The section `slime`: its functions stand at our keys, again and again, and what has no place is refused with what is nearest."""

from pathlib import Path
from typing import Any

import pytest

from streamrl.bridges.slime.flags import run_flags
from streamrl.bridges.slime.known import HOOKS, REFUSED
from streamrl.bridges.slime.section import GROUP, PLACES
from streamrl.config.check import check
from streamrl.config.code import code_digests, loss_code, rollout_code
from streamrl.config.load import convert, dump, from_json, load, override
from streamrl.config.secret_options import with_secrets, without_secrets
from streamrl.config.slime import SlimeConfig
from streamrl.errors import ConfigError
from tests.support.errors import raises

DATA = {"train": "train.jsonl"}


def at(tree: Any, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(tree, section), key)


def test_tables_and_section_say_the_same() -> None:
    fields = {name for name in SlimeConfig.__struct_fields__ if name.endswith("_path")}
    assert fields == set(HOOKS) and not fields & set(REFUSED)
    assert {place.flag: f"{place.section}.{place.key}" for place in PLACES}.items() <= {f: h.becomes for f, h in HOOKS.items()}.items()


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.flag)
def test_a_function_stands_at_our_key(place: Any) -> None:
    config = convert({"slime": {place.flag: "pkg.mod:f"}, "data": DATA}, where="test")
    assert at(config, f"{place.section}.{place.key}") == f"{place.prefix}pkg.mod:f"
    assert from_json(dump(config)) == config
    off = override(config, [f"slime.{place.flag}="])
    plain = convert({"data": DATA}, where="test")
    assert off == plain
    other = override(config, [f"slime.{place.flag}=other.f", "run.steps=3"])
    assert at(other, f"{place.section}.{place.key}") == f"{place.prefix}other.f"


def test_a_rollout_function_has_no_greedy_rollout() -> None:
    config = convert({"slime": {"rollout_function_path": "a.b"}, "loss": {"advantage": "remax"}, "data": DATA}, where="test")
    with raises(ConfigError, key="loss.advantage"):
        check(config)


def test_hooks_without_a_key_of_ours_run_beside_what_keeps_all() -> None:
    section = {"rollout_sample_hook_path": ["a.b"], "rollout_sample_filter_path": "c.d"}
    config = convert({"slime": section, "data": DATA}, where="test")
    assert config.producer.function.endswith("generate:generate") and config.filters.function.endswith("keep_all")
    assert {key: name for key, name in rollout_code(config).items() if key.startswith("slime.")} == {
        "slime.rollout_sample_hook_path[0]": "a.b",
        "slime.rollout_sample_filter_path": "c.d",
    }
    assert override(config, ["slime.rollout_sample_hook_path=[]", "slime.rollout_sample_filter_path="]) == convert(
        {"data": DATA}, where="t"
    )


def test_paths_are_relative_to_the_file_and_their_code_is_digested(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text("async def rm(args, sample):\n    return 1.0\n\ndef adv(args, rollout_data):\n    pass\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    toml = tmp_path / "my.toml"
    toml.write_text(
        '[slime]\ncustom_rm_path = "hooks.py:rm"\ngroup_rm = true\ncustom_advantage_function_path = "hooks.py:adv"\n'
        'rollout_sample_hook_path = ["hooks.py:look"]\n[data]\ntrain = "train.jsonl"\n'
    )
    config = load(toml)
    assert config.reward.kind == f"{GROUP}{tmp_path / 'hooks.py'}:rm"
    assert config.slime.rollout_sample_hook_path == (f"{tmp_path / 'hooks.py'}:look",)
    named = {**rollout_code(config), **loss_code(config)}
    assert {"reward.kind", "loss.advantage", "producer.function", "slime.rollout_sample_hook_path[0]"} <= set(named)
    assert {"reward.kind", "loss.advantage", "slime.rollout_sample_hook_path[0]"} <= set(code_digests(named))


@pytest.mark.parametrize("line", ['custom_rm_path = "hoks.py:rm"', 'rollout_sample_hook_path = ["hoks.py:look"]'])
def test_a_file_that_is_not_there_is_named_by_slimes_key(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    (tmp_path / "my.toml").write_text(f'[slime]\n{line}\n[data]\ntrain = "train.jsonl"\n')
    with pytest.raises(ConfigError, match=rf"expected slime.{line.partition(' ')[0]}.* got no such file"):
        load(tmp_path / "my.toml")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_has_no_place_is_refused_with_what_is_nearest(name: str) -> None:
    for spelled in (name, name.replace("_", "-")):
        with raises(ConfigError, key=f"slime.{spelled}") as caught:
            convert({"slime": {spelled: "a.b"}}, where="my.toml")
        assert REFUSED[name][0] in caught.value.message and caught.value.hint == REFUSED[name][1]


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"slime": {"custom-rm-path": "a.b"}}, "slime.custom-rm-path"),
        ({"slime": {"custom_rm_pth": "a.b"}}, "slime.custom_rm_pth"),
        ({"slime": {"group_rm": True}}, "slime.group_rm"),
        ({"slime": {"custom_rm_path": "a.b"}, "reward": {"kind": "math"}}, "slime.custom_rm_path"),
        ({"slime": {"custom_generate_function_path": "a.b", "rollout_function_path": "a.c"}}, "slime.rollout_function_path"),
        ({"slime": {"rollout_sample_hook_path": ["a.b"], "rollout_function_path": "a.c"}}, "slime.rollout_sample_hook_path"),
        (
            {"slime": {"custom_advantage_function_path": "a.b", "custom_reward_post_process_path": "a.c"}},
            "slime.custom_advantage_function_path",
        ),
        ({"slime": {"custom_tis_function_path": "a.b"}, "loss": {"policy": "gspo"}}, "slime.custom_tis_function_path"),
        ({"slime": {"custom_tis_function_path": "a.b"}, "loss": {"correction": {"kind": "mask"}}}, "slime.custom_tis_function_path"),
    ],
)
def test_what_contradicts_itself_is_refused(tree: dict[str, Any], key: str) -> None:
    with raises(ConfigError, key=key):
        convert(tree, where="my.toml")


def test_args_have_slimes_names_for_what_the_run_says() -> None:
    config = convert(
        {
            "slime": {"custom_rm_path": "a.b", "custom_config": {"max_turns": 3}},
            "tasks": {"batch_tasks": 6, "num_rollouts": 4},
            "trainer": {"minibatches": 2},
            "sampling": {"max_new_tokens": 9, "temperature": 0.7},
            "loss": {"clip_low": 0.1, "correction": {"kind": "clip", "low": 0.2, "high": 3.0}},
        },
        where="test",
    )
    flags = run_flags(config, "/model")
    expected = {"rollout_batch_size": 6, "n_samples_per_prompt": 4, "global_batch_size": 12, "rollout_max_response_len": 9}
    expected |= {"rollout_temperature": 0.7, "eps_clip": 0.1, "tis_clip": 3.0, "tis_clip_low": 0.2, "max_turns": 3}
    expected |= {"custom_rm_path": "a.b", "hf_checkpoint": "/model"}
    assert expected.items() <= flags.items()


def test_secrets_of_custom_config_are_not_recorded() -> None:
    config = convert({"slime": {"custom_rm_path": "a.b", "custom_config": {"judge_api_key": "sk-1", "turns": 2}}}, where="test")
    told, secrets = without_secrets(config)
    assert "sk-1" not in dump(told) and told.slime.custom_config == {"turns": 2}
    assert with_secrets(told, secrets) == config
    assert run_flags(with_secrets(told, secrets), "")["judge_api_key"] == "sk-1"
