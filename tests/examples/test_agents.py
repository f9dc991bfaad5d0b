"""Examples of tools, agents and evaluations: they learn, and their parts do what their pages say."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamrl.config.plugins import resolve
from streamrl.producers.gateway.worker import addresses
from streamrl.runtime.rundir import RunDir
from streamrl.sandbox import run_python
from tests.examples.runs import EXAMPLES, learned, remade, run_example
from tests.support.memory import freed_after_test
from tests.support.processes import until
from tests.support.programs import STREAMRL, Start, said
from tests.support.pythons import python

AGENT = EXAMPLES / "openai_agent"
CALCULATOR = EXAMPLES / "calculator_tool"


def of(example: str, name: str) -> Any:
    return resolve(f"{example}.py:{name}", what="an object", key="test", base=EXAMPLES / example)


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "overrides", "gain"),
    [
        # From a table that knows nothing, 0.3 for asking the calculator is learned first.
        pytest.param("calculator_tool", ["run.steps=40"], 0.1, marks=pytest.mark.slow),
        pytest.param("multi_agent", ["run.steps=25"], 0.1, marks=pytest.mark.slow),
        pytest.param("search", ["run.steps=40"], 0.1, marks=pytest.mark.slow),
        # Means of the first and the last twenty, which share sixteen.
        ("python_tool", ["run.steps=24", "tasks.num_rollouts=4"], 0.03),
    ],
)
async def test_an_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overrides: list[str], gain: float) -> None:
    steps, first, last = await learned(name, tmp_path, monkeypatch, *overrides)
    assert overrides[0] == f"run.steps={steps}" and last > first + gain


@pytest.mark.process
@pytest.mark.parametrize("name", ["calculator_tool", "eval_multi_task", "multi_agent", "openai_agent", "python_tool", "search"])
def test_the_problems_are_what_the_script_writes(tmp_path: Path, name: str) -> None:
    made = remade(name, tmp_path)
    written = {path.name: path.read_bytes() for path in (EXAMPLES / name).glob("*.jsonl") if path.name != "corpus.jsonl"}
    assert written and made == written


@pytest.mark.nats
@pytest.mark.soak
def test_three_roles_learn_together(tmp_path: Path) -> None:
    summary = run_example("multi_agent", tmp_path, "run.steps=25")
    assert summary["steps"] == 25
    assert summary["reward_last"] > summary["reward_first"] + 0.1 and summary["heldout_last"] >= summary["heldout_first"]
    [run] = tmp_path.glob("runs/*")
    for told, *words in (("have the digest of the ledger", "replay", run, "--verify"), ("agent rewriter/2", "inspect", run, "300/3")):
        assert told in python(tmp_path, *STREAMRL, *words)[0]


@pytest.mark.nats
@pytest.mark.slow
async def test_a_guest_leaves_a_run_whose_supervisor_was_killed(tmp_path: Path, start: Start) -> None:
    run = RunDir(tmp_path / "runs" / "calculator")
    sets = [word for text in ("run.steps=100000", "run.until_reward=0", "run.max_seconds=0") for word in ("--set", text)]
    up = await start(*STREAMRL, "up", str(CALCULATOR / "calculator.toml"), *sets)
    await until((run.path / "bus.json").is_file, within_s=120)
    guest = await start(*STREAMRL, "attach", f"{CALCULATOR / 'calculator.py'}:calculator", "--run", "calculator")
    log = run.path / "logs" / "producer-1.log"
    await until(lambda: log.exists() and "engine_found" in log.read_text(), within_s=120)
    freed_after_test(run.load_config(), run)
    up.kill()
    code, left, errors = await said(guest, within_s=40)
    assert code == 0 and "calculator: it is down" in left, left + errors


@pytest.mark.nats
@pytest.mark.slow
def test_an_agent_that_knows_openais_sdk_alone_trains_the_policy(tmp_path: Path) -> None:
    """It is a process of its own that knows a URL and a key."""
    settings = ["run.steps=32", "run.until_reward=0", "tasks.batch_tasks=4", "tasks.max_staleness=0", "gateway.port=0"]
    command = [sys.executable, "-m", "streamrl", "up", str(AGENT / "openai_agent.toml"), "--plain"]
    command += [word for setting in settings for word in ("--set", setting)]
    with (tmp_path / "out").open("w") as out, subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out) as up:
        try:
            run = RunDir(tmp_path / "runs" / "openai-agent")
            while not (found := addresses(run)):
                assert up.poll() is None, (tmp_path / "out").read_text()
                time.sleep(0.1)
            [url] = found.values()
            told, _ = python(tmp_path, "-I", AGENT / "agent.py", url, run.gateway_key_path)
            assert up.wait(60) == 0, (tmp_path / "out").read_text()
        finally:
            up.kill()
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["steps"] == 32 and int(told.split()[0]) >= 32 * 4 * 4
    assert summary["reward_last"] > summary["reward_first"] + 0.1


def test_agents_import_nothing_of_this_package_and_the_readme_shows_the_code_that_runs() -> None:
    assert "streamrl" not in "".join(line for line in (AGENT / "agent.py").read_text().splitlines() if "import" in line)
    [block] = re.findall(r"```python\n(.*?)```", (CALCULATOR / "README.md").read_text(), flags=re.DOTALL)
    assert block in (CALCULATOR / "calculator.py").read_text()


@pytest.mark.parametrize(("candidates", "selected", "reward"), [("888", "8", 1.0), ("388", "3", 0.1), ("333", "8", 0.9), ("333", "4", 0.0)])
def test_the_selector_has_a_reward_of_parts(candidates: str, selected: str, reward: float) -> None:
    assert sum(of("multi_agent", "graded")("8", list(candidates), selected).values()) == pytest.approx(reward)


@pytest.mark.process
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("sum(n)", "6"),
        ("x = max(n)\nprint(x)\nx + 1", "3\n4"),
        ("x = 1", ""),
        ("total(n)", "NameError: name 'total' is not defined"),
        ("sum(n", "SyntaxError: '(' was never closed"),
        ("import sys; sys.exit(3)", ""),
        ("open('/etc/passwd')", "FileNotFoundError: [Errno 2] No such file or directory: '/etc/passwd'"),
        ("'x' * 300", "x" * 200),
        ("while True: print('x')", "it wrote more than 10000 bytes"),
    ],
)
@pytest.mark.needs("namespaces")
async def test_what_the_model_sees_of_a_program(code: str, shown: str) -> None:
    files = {"cell.py": f"n = [1, 2, 3]\n{code}"}
    result = await run_python(of("python_tool", "NOTEBOOK"), files=files, limits=of("python_tool", "LIMITS"))
    assert of("python_tool", "shown")(result) == shown


@pytest.mark.parametrize(("text", "answer"), [("3", True), (" -12 ", True), ("sum(n)", False), ("", False), ("3.0", False)])
def test_a_number_is_an_answer(text: str, answer: bool) -> None:
    assert of("python_tool", "is_answer")(text) is answer


@pytest.mark.parametrize(
    ("ran", "completion", "reward"), [(["ok"], "4", 1.0), (["error"], "4", 0.7), (["ok"], "5", 0.3), ([], "5", 0.0), ([], "4", 0.7)]
)
def test_the_reward(ran: list[str], completion: str, reward: float) -> None:
    task, episode = SimpleNamespace(metadata={"answer": "4"}), SimpleNamespace(metadata={"ran": ran}, completion=completion)
    assert sum(of("python_tool", "score")(task, episode).values()) == reward


def test_every_question_is_answered_by_the_best_passage() -> None:
    rows = [json.loads(line) for line in (EXAMPLES / "search" / "problems.jsonl").read_text().splitlines()]
    queries = [(row["label"], row["metadata"]["answer"]) for row in rows if row["label"].endswith("</search>")]
    assert len(queries) == 5
    for label, answer in queries:
        found = of("search", "search")(of("search", "query_of")(label), 2)
        assert len(found) == 2 and found[-1].endswith(answer)
    assert of("search", "search")("zebra", 2) == of("search", "search")("", 2) == []


def test_queries() -> None:
    for text, query in (
        ("violin</search>", "violin"),
        ("I do not know. <search> a\nviolin </search>", "a\nviolin"),
        ("<search>violin", None),
        ("4", None),
        ("</search>", ""),
        ("<search>a<search>b</search>c</search>", "b"),
    ):
        assert of("search", "query_of")(text) == query


NAME = "eval_multi_task"


@pytest.mark.nats
@pytest.mark.slow
def test_the_example_is_evaluated_on_three_sets(tmp_path: Path) -> None:
    summary = run_example(NAME, tmp_path, "run.steps=24", "evaluation.every=12", "trainer.checkpoint_every=12")
    sets = summary["evaluations"]
    assert list(sets) == ["digits", "letters", "vowels"]
    folder = tmp_path / "runs" / "eval-multi-task" / "evaluations"
    found = {path.name: sorted(one.name for one in path.glob("*.json")) for path in folder.iterdir()}
    assert found == {
        "0.0": ["digits.json", "letters.json", "vowels.json"],
        "0.12": ["digits.json", "letters.json"],
        "0.24": ["digits.json", "letters.json", "vowels.json"],
    }
    last = {name: json.loads((folder / "0.24" / f"{name}.json").read_text()) for name in ("digits", "letters", "vowels")}
    assert [(one["num"], one["n"], one["failed"], one["pinned"]) for one in last.values()] == [
        (4, 1, 0, True),
        (4, 8, 0, True),
        (4, 4, 0, True),
    ]
    assert last["letters"]["accuracy"] > 0.3, "one of a hundred tokens is right by chance"
    assert list(last["letters"]["pass"]) == ["1", "2", "4", "8"]

    # Afterwards, from the checkpoint: the same weights, sampling and seeds, and so the same answers.
    words = ["eval", "eval-multi-task", "--version", "24", "--json"]
    again = {one["set"]: one for one in json.loads(python(tmp_path, *STREAMRL, *words)[0])}
    for name, one in last.items():
        assert (again[name]["accuracy"], again[name]["pass"], again[name]["version"]) == (one["accuracy"], one["pass"], "0.24")
    words[3] = "7"
    assert "got 7: there are 0.12, 0.24" in python(tmp_path, *STREAMRL, *words, code=1)[1]
