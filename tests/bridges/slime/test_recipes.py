"""Slime's own recipes: their arithmetic by number, their refusals by name, and what is written is a configuration that is taken."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from streamrl.bridges.slime.script.draft import Options
from streamrl.bridges.slime.script.flags import FLAGS
from streamrl.bridges.slime.script.importing import ALL, Imported, import_script
from streamrl.doctor.machine import examine_plan
from tests.bridges.slime.recipes import ADAM, MISC, PERF, QWEN3_4B, RECIPES, Arguments, Recipe, script, without

OPTIONS = Options(num_rows=1_001_551)


def imported(folder: Path, arguments: Arguments, entry: str = "train.py", **options: Any) -> Imported:
    (folder / "run.sh").write_text(script(arguments, entry))
    return import_script(folder / "run.sh", **{"options": OPTIONS, **options})


def keys(done: Imported) -> dict[str, Any]:
    """The written configuration by dotted key."""
    found: dict[str, Any] = {}

    def walk(table: dict[str, Any], prefix: str) -> None:
        for name, one in table.items():
            found[prefix + name] = one
            if isinstance(one, dict):
                walk(one, f"{prefix}{name}.")

    walk(tomllib.loads(done.toml), "")
    return found


def refusals(done: Imported) -> list[str]:
    return [one.subject for one in done.report.refused]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_slime(name: str, tmp_path: Path) -> None:
    recipe: Recipe = RECIPES[name]
    done = imported(tmp_path, recipe.arguments, recipe.entry)
    assert sorted(refusals(done)) == sorted(recipe.refused)
    assert bool(done.toml) == (not recipe.refused)
    if recipe.refused:
        assert all(one.line and one.says and one.file.endswith("run.sh") for one in done.report.refused)
        done = imported(tmp_path, recipe.arguments, recipe.entry, leave_out=[ALL])
        assert {one.subject for one in done.report.findings if one.outcome == "left out"} >= set(recipe.refused)
    if not done.toml:
        return  # what is left has no meaning without what was refused
    written = keys(done)
    found = (written["tasks.batch_tasks"], written.get("tasks.num_rollouts", 1), written["trainer.minibatches"], written["run.steps"])
    assert found == recipe.batch
    assert {key: written.get(key) for key in recipe.expected} == recipe.expected
    (tmp_path / "run.toml").write_text(done.toml)
    assert [(check.name, check.found) for check in examine_plan(str(tmp_path / "run.toml")) if check.state == "fail"] == []


def test_each_line_says_where_it_is_from(tmp_path: Path) -> None:
    done = imported(tmp_path, QWEN3_4B)
    lines = (tmp_path / "run.sh").read_text().split("\n")
    for line in done.toml.split("\n"):
        if " = " in line and not line.startswith("#"):
            assert "  # " in line, line
            for said in line.partition("  # ")[2].split("; "):
                flag, comma, place = said.partition(", run.sh:")
                if comma:
                    assert f" {flag}" in lines[int(place) - 1]


@pytest.mark.parametrize(
    ("changed", "steps"),
    [
        ({"rollout-batch-size": "64", "n-samples-per-prompt": "4", "global-batch-size": "64"}, 4),
        ({"global-batch-size": "128"}, 2),
        ({"global-batch-size": "128", "num-steps-per-rollout": "2"}, 2),
        ({"global-batch-size": "8"}, 32),
    ],
)
def test_steps_are_samples_by_the_global_batch(tmp_path: Path, changed: Arguments, steps: int) -> None:
    written = keys(imported(tmp_path, {**QWEN3_4B, **changed}))
    samples = written["tasks.batch_tasks"] * written["tasks.num_rollouts"]
    assert written["trainer.minibatches"] == steps == samples // int(changed["global-batch-size"])


@pytest.mark.parametrize(
    ("changed", "flag", "said"),
    [
        ({"global-batch-size": "100"}, "--global-batch-size", "256 samples of a rollout are 2 x 100 + 56"),
        ({"global-batch-size": "4"}, "--global-batch-size", "256 samples in 64 steps, but groups stay whole, and there are 32"),
        ({"global-batch-size": "256", "num-steps-per-rollout": "2"}, "--global-batch-size", "256 is not 256 samples / 2 steps = 128"),
        ({"num-steps-per-rollout": "3"}, "--num-steps-per-rollout", "256 samples are 85 x 3 + 1"),
        ({"rollout-batch-size": "0"}, "--rollout-batch-size", "takes a whole number of at least 1, got '0'"),
        ({"rollout-batch-size": "32.0"}, "--rollout-batch-size", "takes a whole number of at least 1, got '32.0'"),
        ({"rollout-batch-size": "32 64"}, "--rollout-batch-size", "takes one value, got '32', '64'"),
        ({"rollout-batch-size": ""}, "--rollout-batch-size", "takes one value, got none"),
        ({"lr": "nan"}, "--lr", "takes a number, got 'nan'"),
        ({"lr": "fast"}, "--lr", "takes a number, got 'fast'"),
        ({"balance-data": "true"}, "", ""),
        ({"rollout-shuffle": "true"}, "--rollout-shuffle", "takes no value, got 'true'"),
        ({"rollout-temperature": "0"}, "--rollout-temperature", "must be above 0"),
        ({"rollout-top-p": "0.9"}, "--rollout-top-p", "log-probs over a vocabulary in parts"),
        ({"attention-dropout": "0.1"}, "--attention-dropout", "nothing is dropped here"),
        ({"rollout-num-gpus-per-engine": "3"}, "--rollout-num-gpus-per-engine", "8 GPUs are 2 engines of 3 and 2 more"),
        ({"rm-type": "ifbnch"}, "--rm-type", "ifbnch is none here"),
        ({"rm-type": "boxed_ifbench"}, "--rm-type", "does not read an answer that a box could hold"),
        ({"optimizer": "muon"}, "--optimizer", "muon is none here"),
        ({"kl-loss-coef": "0.1", "kl-coef": "0.1"}, "--kl-coef", "would count the same distance twice"),
        ({"kl-loss-coef": "0.1", "kl-loss-type": "k1"}, "--kl-loss-type", "the gradient of log pi alone"),
        ({"advantage-estimator": "reinforce_plus_plus"}, "--normalize-advantages", "whitening is what scales its advantages"),
        ({"num-rolout": "5"}, "--num-rolout", "no flag of slime, Megatron or SGLang that is known here"),
        ({"eval-config": "eval.yaml"}, "--eval-config", "YAML"),
        ({"sglang-dp-size": "8"}, "--sglang-dp-size", "one server with one group"),
        ({"fp16": ""}, "--fp16", "float16"),
    ],
)
def test_what_does_not_fit_is_refused_by_line(tmp_path: Path, changed: Arguments, flag: str, said: str) -> None:
    done = imported(tmp_path, {**QWEN3_4B, **changed})
    found = [one for one in done.report.refused if one.subject == flag]
    if not flag:
        assert refusals(done) == []
        return
    assert len(found) == 1, refusals(done)
    assert said in found[0].says
    if found[0].line:
        assert f" {flag}" in (tmp_path / "run.sh").read_text().split("\n")[found[0].line - 1]
    else:
        assert flag.removeprefix("--") not in {**QWEN3_4B, **changed}, "what is missing has no line"
    assert not done.toml


@pytest.mark.parametrize(
    "flag", ["num-rollout", "rollout-batch-size", "prompt-data", "hf-checkpoint", "rollout-max-response-len", "rm-type"]
)
def test_what_a_run_cannot_do_without_is_missed_even_where_all_may_be_left_out(tmp_path: Path, flag: str) -> None:
    for more in ([], [ALL]):
        done = imported(tmp_path, without(QWEN3_4B, flag), leave_out=more)
        assert f"--{flag}" in refusals(done) and not done.toml


def test_rows_that_name_their_reward_for_slime_are_told_of_where_it_would_look_at_them(tmp_path: Path) -> None:
    def told(arguments: Arguments) -> list[str]:
        return [one.outcome for one in imported(tmp_path, arguments).report.findings if "metadata.rm_type" in one.says + one.nearest]

    assert told(QWEN3_4B) == ["assumed"]
    assert told(without(QWEN3_4B, "rm-type")) == ["refused"]
    assert told({**QWEN3_4B, "custom-rm-path": "my.rm"}) == [], "it is called for every row"


@pytest.mark.parametrize(
    ("spelled", "value", "key", "expected"),
    [
        ("tis-threshold", "3.0", "loss.correction.high", 3.0),
        ("fsdp-max-tokens-per-gpu", "4096", "trainer.micro_tokens", 4096),
        ("output-dir", "/data/policy", "run.name", "policy"),
        ("use_tis", "", "loss.correction.kind", "truncate"),
    ],
)
def test_spellings_that_no_slime_has_are_read_and_said(tmp_path: Path, spelled: str, value: str, key: str, expected: object) -> None:
    arguments = without(QWEN3_4B, "max-tokens-per-gpu", "save", "load", "save-interval") | {"use-tis": "", spelled: value}
    assert keys(imported(tmp_path, arguments))[key] == expected


def test_instructions_of_rows_are_scored_by_the_same_checks(tmp_path: Path) -> None:
    done = imported(tmp_path, {**QWEN3_4B, "rm-type": "ifbench"})
    assert refusals(done) == [] and keys(done)["reward.kind"] == "ifbench" and keys(done)["data.metadata_key"] == "metadata"
    assert any("pip install 'streamrl[ifbench]'" in one.says for one in done.report.findings)


def test_pairs_of_problems_may_be_in_one_flag_or_in_several(tmp_path: Path) -> None:
    together = imported(tmp_path, {**QWEN3_4B, "eval-prompt-data": "a /x/a.jsonl b.2 y.jsonl@[0:100]"}, cwd=Path("/data"))
    sets = tomllib.loads(together.toml)["evaluation"]["sets"]
    assert [(one["name"], one["path"], one["n"]) for one in sets] == [("a", "/x/a.jsonl", 16), ("b-2", "/data/y.jsonl@[0:100]", 16)]
    (tmp_path / "run.sh").write_text(script(QWEN3_4B).replace("${UNSET_ARGS[@]}", "--eval-prompt-data b /b.jsonl"))
    apart = import_script(tmp_path / "run.sh")
    assert [one["name"] for one in tomllib.loads(apart.toml)["evaluation"]["sets"]] == ["aime", "b"]


def test_shared_gpus_leave_the_trainer_its_part(tmp_path: Path) -> None:
    done = imported(tmp_path, QWEN3_4B)
    written = keys(done)
    assert written["engine.sglang.gpus"] == list(range(8)) and written["tasks.max_staleness"] == 0
    assert written["engine.sglang.flags.mem_fraction_static"] == 0.35
    said = {one.subject: one.says for one in done.report.findings}
    assert "nothing is moved out" in said["--colocate"] and "0.7" in said["--sglang-mem-fraction-static"]


def test_several_hosts_are_placed_by_ray_and_share_single_gpus_only(tmp_path: Path) -> None:
    alone = {**QWEN3_4B, "actor-num-nodes": "2", "rollout-num-gpus-per-engine": "1"}
    written = keys(imported(tmp_path, alone))
    assert written["ray.address"] == "auto" and (written["ray.trainer.gpus"], written["ray.engine.gpus"]) == (0.6, 0.4)
    assert "engine.sglang.gpus" not in written
    assert refusals(imported(tmp_path, {**alone, "rollout-num-gpus-per-engine": "2"})) == ["--colocate"]


def test_the_rate_counts_batches_where_megatron_counts_steps(tmp_path: Path) -> None:
    arguments = {**QWEN3_4B, "global-batch-size": "64", "lr-decay-style": "cosine", "lr-warmup-iters": "10", "lr-decay-iters": "4000"}
    done = imported(tmp_path, {**arguments, "min-lr": "1e-7"})
    written = keys(done)
    assert written["trainer.minibatches"] == 4
    assert (written["trainer.optimizer.warmup_steps"], written["trainer.optimizer.decay_steps"]) == (3, 1000)
    assert written["trainer.optimizer.final_fraction"] == pytest.approx(0.1)
    assert any(one.subject == "--lr-warmup-iters" and "4 optimizer steps" in one.says for one in done.report.findings)


DEFAULTS = without(
    QWEN3_4B, "lr", "adam-beta2", "weight-decay", "eps-clip-high", "lr-decay-style", "rollout-temperature", "rollout-shuffle"
)


def test_a_rate_that_falls_otherwise_is_said(tmp_path: Path) -> None:
    wsd: Arguments = {**QWEN3_4B, "lr-decay-style": "WSD", "lr-wsd-decay-iters": "10"}

    def said(arguments: Arguments) -> dict[str, str]:
        return {one.subject: one.says for one in imported(tmp_path, arguments).report.findings}

    assert said(wsd)["--lr-wsd-decay-style"].startswith("exponential is how")  # Megatron's default
    assert "--lr-wsd-decay-style" not in said({**wsd, "lr-wsd-decay-style": "linear"})
    assert refusals(imported(tmp_path, {**QWEN3_4B, "lr-decay-style": "WSD"})) == ["--lr-wsd-decay-iters"]
    same: Arguments = {"weight-decay-incr-style": "constant", "lr-warmup-init": "0.0"}
    assert refusals(imported(tmp_path, {**QWEN3_4B, **same})) == []
    other: Arguments = {"weight-decay-incr-style": "cosine", "lr-warmup-init": "1e-7"}
    assert sorted(refusals(imported(tmp_path, {**QWEN3_4B, **other}))) == ["--lr-warmup-init", "--weight-decay-incr-style"]
    falls: Arguments = {"lr-decay-style": "inverse-square-root", "lr-warmup-iters": "2", "lr-decay-iters": "10"}
    assert "--min-lr behind it" in said({**QWEN3_4B, **falls})["--lr-decay-iters"]


def test_model_directories_are_written_where_slime_saves(tmp_path: Path) -> None:
    never: Arguments = {**without(QWEN3_4B, "save-interval"), "save-hf": "/out/{rollout_id}"}
    assert "trainer.export_every" not in keys(imported(tmp_path, never))
    assert keys(imported(tmp_path, {**never, "save-interval": "5"}))["trainer.export_every"] == 5


def test_defaults_of_slime_are_written_where_they_are_others(tmp_path: Path) -> None:
    written = keys(imported(tmp_path, {**DEFAULTS, "n-samples-per-prompt": "8"}))
    optimizer = {"learning_rate": 1e-6, "beta2": 0.999, "weight_decay": 0.01, "schedule": "linear", "final_fraction": 0.0}
    expected = {f"trainer.optimizer.{key}": value for key, value in optimizer.items()}
    expected |= {"loss.clip_high": 0.2, "loss.correction.kind": "none", "loss.whiten": "off", "sampling.temperature": 1.0}
    expected |= {"data.shuffle": False, "tasks.drop_zero_variance": False, "run.seed": 42, "model.dtype": "bfloat16"}
    assert {key: written.get(key) for key in expected} == expected


def test_no_flag_that_is_refused_is_dropped_in_silence(tmp_path: Path) -> None:
    names = [flag.name for flag in FLAGS.values() if flag.fate == "refused"]
    assert len(names) > 50
    arguments = {**QWEN3_4B, **{name.removeprefix("--"): "x" for name in names}}
    assert set(names) <= set(refusals(imported(tmp_path, arguments)))
    some = imported(tmp_path, arguments, leave_out=names[:-1])
    assert refusals(some) == names[-1:] and not some.toml
    done = imported(tmp_path, arguments, leave_out=[*names[:-1], names[-1].removeprefix("--")])
    assert {one.subject for one in done.report.findings if one.outcome == "left out"} == set(names)
    assert all(f"{name}: " in done.toml for name in names), "the file says itself what it lacks"


AS_EVER = frozenset(f"--{name}" for name in (*PERF, *MISC, *ADAM, "kl-loss-coef", "num-gpus-per-node"))
"""Of the flags that every script has: what they say here is what streamrl does anyway, or is in a number that others have written."""


@pytest.mark.slow
def test_no_flag_is_dropped_in_silence(tmp_path: Path) -> None:
    """Each by itself beside what a run needs: there is a comment in the file or a line in the report."""
    values = {"whole": "3", "number": "0.375", "text": "x", "wholes": "3", "texts": "x", "switch": "", "any": ""}
    quiet = []
    for flag in FLAGS.values():
        name = flag.name.removeprefix("--")
        if flag.fate in ("mapped", "approximated"):
            done = imported(tmp_path, {**QWEN3_4B, name: QWEN3_4B.get(name, values[flag.kind])}, options=Options())
            said = {one.subject for one in done.report.findings} | set(re.findall(r"(--[\w-]+), run\.sh:", done.toml))
            quiet += [] if flag.name in said else [flag.name]
    assert set(quiet) <= AS_EVER | {"--load"}, "--load is where --save is"


def test_the_scripts_name_is_no_line_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a\nb = [.sh").write_text(script(QWEN3_4B))
    done = import_script(tmp_path / "a\nb = [.sh", options=OPTIONS)
    assert tomllib.loads(done.toml)["run"]


def test_rows_of_an_evaluation_in_a_folder_that_is_not_known_are_refused_as_those_to_train_on(tmp_path: Path) -> None:
    text = script({**QWEN3_4B, "eval-prompt-data": "aime rows.jsonl"})
    (tmp_path / "run.sh").write_text(text.replace("set -ex", 'cd "$(somewhere)"', 1))
    done = import_script(tmp_path / "run.sh", options=OPTIONS)
    assert "--eval-prompt-data" in refusals(done) and not done.toml
