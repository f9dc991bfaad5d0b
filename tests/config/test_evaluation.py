from pathlib import Path

import pytest

from streamrl.config.code import rollout_code
from streamrl.config.evaluation_sets import problem_sets
from streamrl.config.load import dump, from_json, load
from streamrl.config.secret_options import with_secrets, without_secrets
from streamrl.errors import ConfigError
from streamrl.launch.code_check import check_code
from streamrl.runtime.kinds import num_workers

SETS = """
[reward]
kind = "gsm8k"
options = { format_reward = 0.1 }

[evaluation]
every = 10
n = 2
sampling = { temperature = 0.5, max_new_tokens = 32 }

[[evaluation.sets]]
name = "easy"
path = "rows.jsonl@[0:1]"

[[evaluation.sets]]
name = "hard"
path = "rows.jsonl"
n = 8
every = 0
num_problems = 3
pass_reward = 0.5
sampling = { top_p = 0.9 }
reward = { kind = "grade.py:grade", options = { api_key = "s3same", scale = 2 } }
function = "grade.py:ask"
options = { depth = 3 }
prompt_key = "question"
label_key = ""
"""
SET = '[[evaluation.sets]]\nname = "a"\npath = "rows.jsonl"\n'


@pytest.fixture(autouse=True)
def graded(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text(
        "def grade(task, episode, scale, api_key):\n    return 1.0\n\n\nasync def ask(task, engine):\n    return None\n"
    )


def test_a_set_takes_what_it_leaves_out_from_the_other_sections(write, tmp_path) -> None:
    config = load(write('heldout = "rows.jsonl"\n' + SETS))
    heldout, easy, hard = problem_sets(config)
    assert (heldout.name, heldout.key, heldout.n, heldout.config) == ("heldout", "data.heldout", 2, config)
    assert (easy.n, easy.every, easy.num_problems, easy.pass_reward) == (2, 10, 256, 1.0)
    assert (easy.path, easy.sampling) == (f"{tmp_path}/rows.jsonl@[0:1]", config.evaluation.sampling)
    assert (easy.config.reward, easy.config.producer) == (config.reward, config.producer)
    assert (hard.n, hard.every, hard.num_problems, hard.pass_reward) == (8, 0, 3, 0.5)
    assert (hard.sampling.temperature, hard.sampling.top_p, hard.sampling.max_new_tokens) == (0.5, 0.9, 32)
    assert (hard.config.reward.kind, hard.config.reward.options) == (f"{tmp_path}/grade.py:grade", {"api_key": "s3same", "scale": 2})
    assert (hard.config.producer.function, hard.config.producer.options) == (f"{tmp_path}/grade.py:ask", {"depth": 3})
    assert (hard.config.data.prompt_key, hard.config.data.label_key) == ("question", "")
    assert num_workers(config, "evaluator") == 1
    assert from_json(dump(config)) == config


def test_sets_have_their_own_code_secrets_and_rewards(write, tmp_path) -> None:
    config = load(write(SETS), overrides=["reward.key=answer"])
    easy, hard = problem_sets(config)
    assert easy.config.reward == config.reward and easy.config.reward.key == "answer"
    assert hard.config.reward.kind.endswith("grade.py:grade") and hard.config.reward.key == ""
    config = load(write(SETS))
    assert rollout_code(config) == {
        "evaluation.sets[hard].function": f"{tmp_path}/grade.py:ask",
        "evaluation.sets[hard].reward.kind": f"{tmp_path}/grade.py:grade",
    }
    told, secrets = without_secrets(config)
    assert secrets == {"evaluation.sets[hard].reward": {"api_key": "s3same"}}
    assert "s3same" not in dump(told)
    assert with_secrets(told, secrets) == config
    more = ("", 'reward = { kind = "f1" }\n', 'reward_key = "kind"\nreward = { kind = "dapo", key = "acc" }\n')
    text = "".join(SET.replace('"a"', f'"{name}"') + line for name, line in zip("abc", more, strict=True))
    config = load(write(f'reward_key = "grade"\n{text}[reward]\nkind = "math"\nkey = "answer"\n'))
    found = [(one.config.reward.kind, one.config.reward.key, one.config.data.reward_key) for one in problem_sets(config)]
    assert found == [("math", "answer", "grade"), ("f1", "", ""), ("dapo", "acc", "kind")]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[evaluation.sets]]\npath = "rows.jsonl"', r"sets\[0\]\.name must be set"),
        ('[[evaluation.sets]]\nname = "a"', r"sets\[a\]\.path must name rows"),
        ('[[evaluation.sets]]\nname = "a b"\npath = "rows.jsonl"', r"got 'a b', in evaluation\.sets\[a b\]"),
        (SET * 2, "got 'a' twice"),
        ('[[evaluation.sets]]\nname = "a"\npath = "no.jsonl"', r"sets\[a\]\.path to name a file"),
        (SET + "n = 0", r"sets\[a\]\.n must be at least 1, got 0"),
        (SET + "n = 4", "at temperature 0: they would all be the same"),
        (SET + 'promt_key = "p"', r"got evaluation\.sets\[a\]\.promt_key"),
        (SET + 'reward = { knd = "p" }', r"got evaluation\.sets\[a\]\.reward\.knd"),
        (SET + "sampling = { temprature = 1 }", r"temprature.*in evaluation\.sets\[a\]"),
        (SET + "sampling = { temperature = nan }", r">= 0, got nan, in evaluation\.sets\[a\]"),
        (SET + "reward = { options = { b = 1 } }", "got none in"),
        (SET + 'reward = { kind = "late" }', "needs one at once"),
        (SET + 'reward = { kind = "g.py:f" }', r"sets\[a\]\.reward\.kind to name a file"),
        (SET + 'function = "verifiers:x"', "not evaluated by tasksets"),
        (SET + "max_prompt_tokens = 256", "leave no room for an answer"),
        ('[[evaluation.sets]]\nname = "heldout"\npath = "rows.jsonl"\n[data]\nheldout = "rows.jsonl"', "got 'heldout' twice"),
        ("[evaluation]\nshare = 0.0", "share must be above 0"),
    ],
)
def test_what_is_wrong_with_a_set_is_said_with_its_name(write, text: str, words: str) -> None:
    if "[data]" in text:
        text = 'heldout = "rows.jsonl"\n' + text.partition("\n[data]")[0]
    with pytest.raises(ConfigError, match=words):
        load(write(text + "\n"))


async def test_a_reward_of_a_set_that_is_none_is_found_before_the_start(write) -> None:
    wrong = SET + 'reward = { kind = "exact" }\n'
    with pytest.raises(ConfigError, match=r"evaluation\.sets\[a\]: reward\.kind must be"):
        await check_code(load(write(wrong)))


@pytest.mark.process
async def test_the_code_of_a_set_is_held_against_its_options(write) -> None:
    await check_code(load(write(SETS)))
    with pytest.raises(ConfigError, match=r"evaluation\.sets\[hard\]\.reward\.kind"):
        await check_code(load(write(SETS.replace("scale = 2", "scales = 2"))))
