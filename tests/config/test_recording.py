"""What engines are to record that they cannot, and what nobody reads, is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.config.recording import Recording, recording_of
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from tests.support.errors import raises

REPLAY, CUT = "trainer.support_replay=true", "sampling.top_p=0.9"
DPPO = ("loss.policy=dppo", "loss.correction.kind=none", "loss.dppo_divergence=topk_tv")
SGLANG = ("engine.kind=sglang", "engine.sglang.gpus=[0]")


@pytest.fixture
def loaded(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1", "label": "1"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f"[data]\ntrain = {str(rows)!r}\n")

    def load_with(*given: str) -> Config:
        return load(file, list(given))

    return load_with


def test_a_run_records_what_its_trainer_reads(loaded) -> None:
    assert recording_of(loaded()) == recording_of(loaded(CUT)) == Recording()
    assert recording_of(loaded(REPLAY, CUT)) == Recording(support=True) and not Recording(support=True).logprobs
    assert recording_of(loaded(*DPPO)) == Recording(top=20) and Recording(top=20).logprobs
    assert recording_of(loaded(*DPPO, REPLAY, CUT, "loss.dppo_top_k=8")) == Recording(support=True, top=8)
    assert recording_of(loaded(*SGLANG, REPLAY, CUT, "sampling.top_k=4096")) == Recording(support=True)
    assert recording_of(loaded(REPLAY, "data.sampling_key=draw")) == Recording(support=True), "rows may cut"


REFUSED = [
    ((REPLAY,), "trainer.support_replay", "whole vocabulary"),
    ((REPLAY, CUT, *SGLANG), "sampling.top_k", "got -1"),
    ((REPLAY, *SGLANG, "sampling.top_k=4097"), "sampling.top_k", "between 1 and 4096"),
    ((REPLAY, CUT, *SGLANG, "sampling.top_k=50", "sampling.min_p=0.1"), "sampling.min_p", "top_p"),
    ((REPLAY, *SGLANG, "sampling.top_k=50", "engine.sglang.flags.speculative_algorithm=EAGLE"), "trainer.support_replay", "speculative"),
    ((REPLAY, CUT, "loss.slime_loss=mine.py:loss"), "trainer.support_replay", "slime_loss"),
    ((REPLAY, CUT, "trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor=2"), "sampling.top_p", "parts"),
    (
        (REPLAY, "data.sampling_key=draw", "trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor=2"),
        "trainer.support_replay",
        "parts",
    ),
    ((REPLAY, "run.kind=sft"), "trainer.support_replay", "no engine"),
    (("loss.dppo_top_k=8",), "loss.dppo_top_k", "topk_tv"),
    (("loss.policy=dppo", "loss.correction.kind=none", "loss.dppo_top_k=8"), "loss.dppo_top_k", "topk_tv"),
    ((*DPPO, CUT), "loss.dppo_divergence", "cuts a part off"),
    ((*DPPO, "loss.dppo_bound=1"), "loss.dppo_bound", "topk_tv"),
    ((*DPPO, "engine.kind=table", "trainer.backend=table"), "loss.policy", "table"),
    ((*DPPO, "trainer.backend=megatron", "trainer.ranks=2", "trainer.tensor=2"), "loss.dppo_divergence", "tensor = 2"),
    ((*DPPO, *SGLANG, REPLAY, "sampling.top_k=50"), "loss.dppo_divergence", "without the log-probs"),
    ((*DPPO, *SGLANG, "engine.sglang.flags.speculative_algorithm=EAGLE"), "loss.dppo_divergence", "speculative"),
    (("loss.dppo_divergence=topk_tv",), "loss.dppo_divergence", "dppo"),
]


@pytest.mark.parametrize(("given", "key", "said"), REFUSED, ids=[" ".join(given) for given, _, _ in REFUSED])
def test_what_cannot_be_or_is_for_nobody_is_refused(loaded, given: tuple[str, ...], key: str, said: str) -> None:
    with raises(ConfigError, key=key) as caught:
        loaded(*given)
    assert said in caught.value.message and caught.value.hint
