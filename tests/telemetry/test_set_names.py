import pytest

from streamrl.config.evaluation_sets import HELDOUT
from streamrl.monitor.numbers import Evaluation
from streamrl.monitor.series import known, values_of
from streamrl.monitor.sinks.names import prometheus_name
from streamrl.schemas.versions import Version
from streamrl.telemetry.names import METRICS, declared, metric
from streamrl.telemetry.set_names import SET_METRICS, set_metric

ALL = Evaluation(
    version=Version(0, 3),
    accuracy=0.5,
    num=4,
    set="gsm8k-hard",
    passes={1: 0.5, 8: 0.75},
    majorities={8: 0.5},
    truncated_ratio=0.1,
    failed_ratio=0.0,
    response_len=12.0,
    took_s=3.0,
)


@pytest.mark.parametrize("name", ["eval/", "eval/a b", "eval/a-pass@", "eval/a-pass@x", "eval/a/b", "eval/" + "a" * 65, "evil/a"])
def test_other_names_are_none(name: str) -> None:
    assert set_metric(name) is None


def test_every_value_of_an_evaluation_has_a_declared_name() -> None:
    values = values_of(ALL)
    assert known(values) == values
    assert set(values) == {
        *("eval/gsm8k-hard", "eval/gsm8k-hard-pass@1", "eval/gsm8k-hard-pass@8", "eval/gsm8k-hard-maj@8"),
        *("eval/gsm8k-hard-truncated_ratio", "eval/gsm8k-hard-failed_ratio", "eval/gsm8k-hard-response_len", "eval/gsm8k-hard-took_s"),
    }
    forms = {name.replace("gsm8k-hard", "{set}").replace("@1", "@{k}").replace("@8", "@{k}") for name in values}
    assert forms == SET_METRICS.keys()
    assert values_of(Evaluation(version=Version(0, 3), accuracy=None, num=4)) == {}
    found = metric("eval/gsm8k-hard-pass@8")
    assert found.meaning.startswith("pass@8: ") and "of 8 samples" in found.meaning
    assert "`gsm8k-hard`" in metric("eval/gsm8k-hard").meaning
    assert declared(f"eval/{HELDOUT}") is METRICS["eval/heldout"]
    assert prometheus_name("eval/gsm8k-hard-pass@8") == ("streamrl_eval_gsm8k_hard_pass_8", "")
