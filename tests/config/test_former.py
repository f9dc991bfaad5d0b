"""What earlier versions wrote is read as what it means now; what contradicts itself is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from streamrl.config.check import check
from streamrl.config.former import LATER_DECISIONS, in_present_words
from streamrl.config.load import convert, dump, from_json, override, override_keys
from streamrl.config.loss import CorrectionConfig, LossConfig, RejectionConfig
from streamrl.config.tree import Config, DataConfig
from streamrl.errors import ConfigError
from tests.support.errors import raises

OLD_REJECT = {"reject": "k3", "reject_level": "sequence_mean", "reject_low": 0.0, "reject_high": 0.1}


def loss_of(**section: Any) -> LossConfig:
    return convert({"loss": section}, where="old.json").loss


def criteria_of(**section: Any) -> tuple[RejectionConfig, ...]:
    return loss_of(correction=section).correction.reject


@pytest.mark.parametrize("name", ["gspo", "cispo"])
def test_a_former_advantage_is_grpo_with_that_policy_loss(name: str) -> None:
    want = LossConfig(advantage="grpo", policy=name, clip_low=0.1)
    assert loss_of(advantage=name, clip_low=0.1) == loss_of(advantage=name, policy="", clip_low=0.1) == want
    assert loss_of(advantage=name, policy=name, clip_low=0.1) == want
    assert override(Config(), ["data.train=x", f"loss.advantage={name}"]).loss == LossConfig(policy=name)


def test_a_former_advantage_names_its_policy_loss_and_no_other() -> None:
    with raises(ConfigError, key="loss.policy") as caught:
        loss_of(advantage="gspo", policy="sapo")
    assert caught.value.values["key"] == "loss.policy"
    assert "loss.advantage = 'grpo' for sapo" in caught.value.hint
    loss = loss_of(advantage="gspo", slime_loss="mine.py:loss")
    check(convert({"data": {"train": "x"}, "loss": {"advantage": "gspo", "slime_loss": "mine.py:loss"}}, where="x"))
    from streamrl.trainers.torch.slime_loss import slime_args

    assert slime_args(loss).advantage_estimator == "gspo"
    assert slime_args(LossConfig(advantage="rloo", slime_loss="mine.py:loss")).advantage_estimator == "rloo"


def test_criteria_in_former_words_and_several() -> None:
    assert criteria_of(**OLD_REJECT) == (RejectionConfig(measure="k3", level="sequence_mean", high=0.1),)
    assert criteria_of(reject="ratio", reject_low=0.5, reject_high=2) == (RejectionConfig(low=0.5, high=2.0),)
    assert criteria_of(reject="none", reject_level="token", reject_low=0.0, reject_high=0.0) == ()
    assert criteria_of(reject="none") == criteria_of(reject=[]) == criteria_of() == ()
    tables = [{"measure": "ratio", "level": "sequence_mean", "low": 0.9, "high": 1.1}, {"measure": "k2", "high": 0.5}]
    want = (RejectionConfig(level="sequence_mean", low=0.9, high=1.1), RejectionConfig(measure="k2", high=0.5))
    assert criteria_of(reject=tables) == want
    text = '[{measure="ratio", level="sequence_mean", low=0.9, high=1.1}, {measure="k2", high=0.5}]'
    assert override(Config(), ["data.train=x", f"loss.correction.reject={text}"]).loss.correction.reject == want
    one = override(Config(), ["data.train=x", "loss.correction.reject=k3", "loss.correction.reject_high=0.2"])
    assert one.loss.correction.reject == (RejectionConfig(measure="k3", high=0.2),)
    assert override(one, ["loss.correction.reject_high=0.3"]).loss.correction.reject == (RejectionConfig(measure="k3", high=0.3),)
    assert override(one, ["loss.correction.reject=none"]).loss.correction.reject == ()
    assert override_keys(["loss.correction.reject_high=0.3"]) == ["loss.correction.reject_high"]
    two = override(one, ['loss.correction.reject=[{measure="k2", high=0.5}, {measure="k3", high=0.1}]'])
    with pytest.raises(ConfigError, match="single criterion"):
        override(two, ["loss.correction.reject_high=0.3"])


@pytest.mark.parametrize(
    ("correction", "message"),
    [
        ({"reject_high": 2.0}, "but loss.correction.reject is none"),
        ({"reject": [], "reject_low": -1.0}, "but loss.correction.reject is none"),
        ({"reject": "k4"}, "must be one of 'ratio', 'k1', 'k2', 'k3', got 'k4'"),
        ({"reject": 0}, "expected array, got int|expected list, got int"),
        ({"reject": False}, "expected list, got bool"),
        ({"reject": "k3", "reject_high": "much"}, "expected float, got str at loss.correction.reject"),
        ({"reject": [{"measure": "k3", "hihg": 1.0}]}, r"got loss\.correction\.reject\[0\]\.hihg"),
        ({"reject": ["k3"]}, "expected table, got str at loss.correction.reject"),
        ({"reject_hihg": 1.0}, "expected a known key, got loss.correction.reject_hihg"),
    ],
)
def test_what_means_nothing_is_refused(correction: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        criteria_of(**correction)


@pytest.mark.parametrize("loss", [{"advantage": ["gspo"]}, {"advantage": 3}, {"correction": 3}, {"correction": None}, 3, "grpo"])
def test_a_section_of_another_type_is_an_error_of_the_configuration(loss: Any) -> None:
    with raises(ConfigError, path="x"):
        convert({"loss": loss}, where="x")


@pytest.mark.parametrize(
    ("criteria", "message"),
    [
        ([{"measure": "k3"}], "needs low below high"),
        ([{"measure": "k3", "high": float("nan")}], "must be a finite number"),
        ([{"measure": "k3", "high": 1.0}, {"measure": "k1", "low": 0.0, "high": 1.0}], "k1 has either sign"),
        ([{"measure": "k2", "low": -1.0, "high": 1.0}], "never negative"),
        ([{"measure": "k3", "high": 1.0}, {"measure": "k3", "high": 0.5}], "several times"),
    ],
)
def test_every_criterion_is_checked(criteria: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(convert({"data": {"train": "x"}, "loss": {"correction": {"reject": criteria}}}, where="x"))
    assert caught.value.values["key"] == "loss.correction.reject"


def test_a_recorded_configuration_is_read_and_written_in_present_words() -> None:
    tree = json.loads(dump(Config()))
    tree["loss"] |= {"advantage": "gspo", "policy": ""}
    tree["loss"]["correction"] |= OLD_REJECT
    config = from_json(json.dumps(tree))
    assert config.loss == LossConfig(
        policy="gspo", correction=CorrectionConfig(reject=(RejectionConfig(measure="k3", level="sequence_mean", high=0.1),))
    )
    assert from_json(dump(config)) == config
    tree = {"tasks": {"drop_zero_spread": False, "batch_tasks": 4}}
    assert in_present_words(tree) == {"tasks": {"drop_zero_variance": False, "batch_tasks": 4}}
    assert tree["tasks"].keys() == {"drop_zero_spread", "batch_tasks"}
    config = Config(data=DataConfig(train="rows.jsonl"))
    assert not override(config, ["tasks.drop_zero_spread=false"]).tasks.drop_zero_variance
    assert override_keys(["tasks.drop_zero_spread=false"]) == ["tasks.drop_zero_variance"]
    with pytest.raises(ConfigError) as caught:
        in_present_words({"tasks": {"drop_zero_spread": False, "drop_zero_variance": True}})
    assert caught.value.values["key"] == "tasks.drop_zero_spread"


def test_a_recorded_configuration_without_a_decision_is_one_without_it() -> None:
    tree = json.loads(dump(Config()))
    assert (tree["tasks"]["inexact"], tree["tasks"]["check_max_len"]) == ("mask", True)
    assert from_json(dump(Config())) == Config()
    for key in LATER_DECISIONS:
        section, name = key.split(".")
        del tree[section][name]
    old = from_json(json.dumps(tree))
    assert (old.tasks.inexact, old.tasks.check_max_len) == ("allow", False)
    assert json.loads(dump(old)) == tree, "it stays one without it, however often it is written"
    assert convert(tree, where="a file").tasks.inexact == "mask"
    assert from_json(json.dumps({"tasks": 3} | {"run": {}}).replace("3", "{}")).tasks.inexact == "allow"


@pytest.mark.parametrize(("former", "present"), [(True, 0), (False, "all")])
def test_gradient_checkpointing_is_a_number_of_layers_that_keep_their_activations(former: bool, present: int | str) -> None:
    assert convert({"trainer": {"gradient_checkpointing": former}}, where="old.json").trainer.activations == present
    text = f"trainer.gradient_checkpointing={str(former).lower()}"
    assert override(Config(), ["data.train=x", text]).trainer.activations == present
    assert override_keys([text]) == ["trainer.activations"]
    recorded = json.loads(dump(Config()))
    del recorded["trainer"]["activations"]
    recorded["trainer"]["gradient_checkpointing"] = former
    assert from_json(json.dumps(recorded)).trainer.activations == present


def test_gradient_checkpointing_beside_activations_or_of_another_type_is_refused() -> None:
    with raises(ConfigError, key="trainer.gradient_checkpointing"):
        convert({"trainer": {"gradient_checkpointing": True, "activations": 3}}, where="x.toml")
    for given in ({"gradient_checkpointing": "yes"}, {"activations": -1}, {"activations": "some"}, {"activations": True}):
        with pytest.raises(ConfigError, match="activations"):
            convert({"trainer": given}, where="x.toml")
