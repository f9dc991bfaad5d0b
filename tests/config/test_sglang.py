"""Sections of engines: sglang, what is recorded, and ray."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from streamrl.config.load import load
from streamrl.config.recording import Recording, recording_of
from streamrl.config.tree import Config
from streamrl.errors import ConfigError
from tests.support.errors import raises
from tests.support.refusals import refused


def sglang(text: str, engine: str = "") -> str:
    return f"[engine]\nkind = 'sglang'\n{engine}[engine.sglang]\n{text}"


def test_flags_pass_through_and_an_interpreter_is_found_from_the_file(write, tmp_path: Path) -> None:
    flags = "flags = {mem-fraction-static = 0.8, attention_backend = 'fa3', speculative_algorithm = 'NGRAM'}\n"
    text = sglang(f"tensor_parallel = 2\ngpus = [0, 1]\n{flags}")
    config = load(write(text), ["engine.sglang.flags.log_level=info"]).engine.sglang
    assert config.flags == {"mem-fraction-static": 0.8, "attention_backend": "fa3", "speculative_algorithm": "NGRAM", "log_level": "info"}
    assert config.gpus == (0, 1)
    (tmp_path / "python").symlink_to(sys.executable)
    assert load(write(sglang("python = './python'\n"))).engine.sglang.python == str(tmp_path / "python")
    assert load(write(sglang("python = 'python3'\n"))).engine.sglang.python == "python3"


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (sglang("tensor_paralel = 2\n"), "got engine.sglang.tensor_paralel", "did you mean engine.sglang.tensor_parallel?"),
        (sglang("swap = 'flop'\n"), "engine.sglang.swap", ""),
        (sglang("flags = {dp_size = 2}\n"), "one server with one group", "engine.workers"),
        (sglang("flags = {data-parallel-size = 2}\n"), "one server with one group", "engine.workers"),
        (sglang("flags = {pp_size = 2}\n"), "pipeline", "tensor_parallel"),
        (sglang("flags = {quantization = 'fp8'}\n"), "needs engine.sglang.swap = pause", "choose pause"),
        (sglang("flags = {tp_size = 2}\n"), "engine.sglang.tensor_parallel does", "set engine.sglang.tensor_parallel"),
        (sglang("flags = {api_key = 'x'}\n"), "the worker does", "leave it out"),
        (sglang("flags = {disagregation_mode = 'prefill'}\n"), "no flag of SGLang", "did you mean disaggregation_mode?"),
        (sglang("env = {SGLANG_RETURN_ORIGINAL_LOGPROB = '1'}\n"), "distribution drawn from", "leave it out"),
        (sglang("env = {STREAMRL_PLUGIN = '{}'}\n"), "set by the worker", "leave it out"),
        (sglang("gpus = [0, 0]\n"), "different numbers", "once"),
        (sglang("gpus = [0]\ntensor_parallel = 2\n"), "must name 2 GPUs", "for each engine"),
        (sglang("", engine="workers = 2\n"), "2 engines need engine.sglang.gpus", "name 2 GPUs"),
        (sglang("max_gap_ms = -1\n"), "engine.sglang.max_gap_ms must be at least 0", "--set"),
        ("[engine.sglang]\ntensor_parallel = 2\n", "is for engine.kind = sglang, got 'local'", "leave the section out"),
    ],
)
def test_what_would_break_is_refused_with_a_hint(write, text: str, message: str, hint: str):
    with pytest.raises(ConfigError) as caught:
        load(write(text))
    assert message in caught.value.message and caught.value.hint and hint in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        sglang("flags = {dp_size = 1, pp_size = 1, enable_dp_attention = false}\n"),
        sglang("swap = 'pause'\nflags = {quantization = 'fp8'}\n"),
        sglang("flags = {device = 'cpu', kv_cache_dtype = 'fp8_e5m2'}\n", engine="workers = 2\n"),
    ],
)
def test_what_works_is_accepted(write, text: str):
    assert load(write(text)).engine.kind == "sglang"


REPLAY, CUT = "trainer.support_replay=true", "sampling.top_p=0.9"
DPPO = ("loss.policy=dppo", "loss.correction.kind=none", "loss.dppo_divergence=topk_tv")
SGLANG = ("engine.kind=sglang", "engine.sglang.gpus=[0]")


@pytest.fixture
def loaded(write) -> Callable[..., Config]:
    return lambda *given: load(write(""), given)


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
    with refused(ConfigError, said, hint=True, key=key):
        loaded(*given)


def test_a_whole_section_of_ray(write) -> None:
    config = load(
        write(
            "[ray]\naddress = 'auto'\n[ray.trainer]\ngpus = 0.4\n[ray.engine]\nstrategy = 'SPREAD'\nresources = {fast = 1}\n"
            "[ray.runtime_env.env_vars]\nHF_HOME = '/models'\n",
        )
    )
    assert (config.ray.address, config.ray.trainer.gpus, config.ray.engine.resources) == ("auto", 0.4, {"fast": 1})
    assert config.ray.runtime_env == {"env_vars": {"HF_HOME": "/models"}}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("[ray.trainer]\ngpus = 1.5\n", "ray.trainer.gpus"),
        ("[ray.engine]\ngpus = -0.5\n", "ray.engine.gpus"),
        ("[ray.engine]\ncpus = -1.0\n", "ray.engine.cpus"),
        ("[ray.engine]\nresources = {GPU = 1}\n", "ray.engine.resources"),
        ("[ray.engine]\nresources = {fast = 0}\n", "ray.engine.resources.fast"),
        ("[ray]\nstart_timeout_s = 0\n", "ray.start_timeout_s"),
        ("[ray.others]\nstrategy = 'STRICT_SPREAD'\n", "ray.others.strategy"),
        ("[ray]\naddress = 'ray://head:10001'\n", "ray.address"),
        ("[ray]\naddress = 'auto'\n[trainer]\ngpu = 1\n", "trainer.gpu"),
        ("[ray]\naddress = 'auto'\ntrainer.gpus = 0.5\n[trainer]\nranks = 2\n", "ray.trainer.gpus"),
        ("[ray]\naddress = 'auto'\n[model]\npath = '.'\n[engine]\nkind = 'sglang'\nsglang.gpus = [0]\n", "engine.sglang.gpus"),
        (
            "[ray]\naddress = 'auto'\nengine.gpus = 0.5\n[model]\npath = '.'\n[engine]\nkind = 'sglang'\nsglang.tensor_parallel = 2\n",
            "ray.engine.gpus",
        ),
    ],
)
def test_what_it_may_not_say(write, text: str, key: str) -> None:
    with raises(ConfigError, key=key):
        load(write(text))


def test_several_engines_on_sglang_need_no_list_of_gpus_with_ray(write) -> None:
    text = "[model]\npath = '.'\n[engine]\nkind = 'sglang'\nworkers = 2\n"
    with raises(ConfigError, key="engine.sglang.gpus"):
        load(write(text))
    assert load(write(text + "[ray]\naddress = 'auto'\n")).engine.workers == 2
