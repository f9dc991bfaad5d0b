import gc
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks.engine import measure
from benchmarks.engine.report import build_report
from benchmarks.engine.spec import MODELS, Spec
from benchmarks.raw import Fact, Raw, Round, read, write
from benchmarks.report import marks, render
from benchmarks.shapes import model_config
from streamrl.cli import main
from streamrl.config.tree import ModelConfig
from streamrl.data.model import write_qwen3
from tests.bench.known import raw_of


def timing(contender: str, number: int, wall_s: float, cpu_s: float, *, batch: int = 8) -> Round:
    values = {"tokens": 1000, "wall_s": wall_s, "cpu_s": cpu_s}
    return Round(cell=f"quickstart, {batch}", contender=contender, round=number, values=values)


def raw() -> Raw:
    ours = [timing("streamrl", 0, 0.5, 0.4), timing("streamrl", 1, 1.0, 0.4), timing("streamrl", 2, 0.25, 0.4)]
    base = [timing("generate", 0, 1.0, 0.8), timing("generate", 1, 1.0, 0.8), timing("generate", 2, 1.0, 0.8)]
    slower = [timing("streamrl", 0, 2.0, 2.0, batch=1), timing("generate", 0, 1.0, 1.0, batch=1)]
    facts = [
        Fact("parameters", "quickstart", 410_000),
        Fact("left out", "generate_batch (quickstart)", "ValueError: no such thing"),
        Fact("log-prob distance", "quickstart", 1e-6),
    ]
    return raw_of("engine", Spec(models=("quickstart",), batches=(1, 8), rounds=3), [*ours, *base, *slower], facts)


def test_medians_ratios_and_what_does_not_run():
    report = build_report(raw())
    ours = next(row for row in report.rows if (row.cell, row.contender) == ("quickstart, 8", "streamrl"))
    speed = ours.values["tokens_per_s"]
    assert (speed.p50, speed.low, speed.high) == (2000, 1000, 4000)
    assert ours.values["ratio"].p50 == 2.0, "the rounds' ratios are 2, 1 and 4"
    assert ours.values["cpu_us"].p50 == pytest.approx(400) and ours.values["cpu_ratio"].p50 == pytest.approx(2.0)
    (target,) = report.targets
    assert (target.got, target.met) == ("missed at quickstart, 1 (0.50)", False)
    fast = msgspec.structs.replace(raw(), rounds=[one for one in raw().rounds if one.cell == "quickstart, 8"])
    assert [(target.got, target.met) for target in build_report(fast).targets] == [("2.00 and more", True)]
    text = render(build_report(raw()))
    assert "2,000 (1,000 - 4,000)" in text
    assert "| missed at quickstart, 1 (0.50) | NO " in text
    assert "here: ValueError" in text
    assert "0.41 M parameters" in text and "1.0e-06 off transformers" in text
    assert "a processor, 2 cores" in text


def test_the_quickstarts_model_is_the_one_that_a_run_builds(tmp_path):
    write_qwen3(tmp_path, ModelConfig(max_len=32), seed=0)
    built = json.loads((tmp_path / "config.json").read_text())
    ours = model_config(MODELS["quickstart"])
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"):
        assert ours[key] == built[key], key
    assert (ours["vocab_size"], ours["tie_word_embeddings"]) == (built["vocab_size"], built["tie_word_embeddings"])


def test_a_report_is_made_again_and_put_into_a_document(tmp_path, capsys):
    write(tmp_path, raw().header, [*raw().facts, *raw().rounds])
    document = tmp_path / "page.md"
    begin, end = marks("engine")
    document.write_text(f"before\n\n{begin}\nold\n{end}\n\nafter\n")
    for _ in range(2):
        assert main(["bench", "engine", "--report", str(tmp_path), "--docs", str(document)]) == 0
    text = document.read_text()
    assert (
        text.count(begin) == 1
        and text.startswith(f"before\n\n{begin}\n\n| model")
        and text.endswith(f"{end}\n\nafter\n")
        and "old" not in text
    )
    document.write_text("no marks")
    assert main(["bench", "engine", "--report", str(tmp_path), "--docs", str(document)]) == 1
    assert "expected the marks" in capsys.readouterr().err
    assert main(["bench", "loop", "--report", str(tmp_path)]) == 1, "the raw file of another benchmark"


def test_a_tiny_run_measures_all_three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """In this process: what starts the measuring one is `child`, as everywhere."""

    def run_here(process: list[str], *, env: object, check: bool) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", process)
        measure.main()
        return subprocess.CompletedProcess(process, 0)

    monkeypatch.setattr(gc, "collect", lambda *_: 0)  # which transformers does behind each batch, whatever else the session holds
    monkeypatch.setattr(measure, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(measure, "child", lambda module, *words, env: {"process": [module, *map(str, words)], "env": env})
    monkeypatch.setattr(measure.subprocess, "run", run_here)
    out = tmp_path / "out"
    flags = ["--models", "quickstart", "--batches", "1,3", "--tokens", "4", "--prompt", "3", "--rounds", "2", "--round-s", "0.01"]
    assert main(["bench", "engine", *flags, "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((out / "report.json").read_text())
    found = read(out, "engine")
    contenders = {one.contender for one in found.rounds} | {about.split(" ")[0] for about in found.named("left out")}
    assert contenders == {"streamrl", "generate", "generate_batch"}
    cells = {(one.cell, one.contender, one.round) for one in found.rounds}
    assert {(f"quickstart, {batch}", "streamrl", number) for batch in (1, 3) for number in (0, 1)} <= cells
    per_round: dict[tuple[str, int], set[float]] = {}
    for one in found.rounds:
        per_round.setdefault((one.cell, one.round), set()).add(one.values["tokens"])
        assert one.values["tokens"] % (4 * int(one.cell.split(", ")[1])) == 0 and one.values["wall_s"] > 0
    assert all(len(tokens) == 1 for tokens in per_round.values()), "every contender makes as many tokens"
    assert found.named("log-prob distance")["quickstart"] < 1e-4, "ours samples from the model that the others run"
    assert "| quickstart | 1 " in (out / "table.md").read_text()
    assert main(["bench", "engine", *flags, "--out", str(out)]) == 1, "the files of another run are not overwritten"
