"""A recording of somebody else names code: it runs only when that is asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from streamrl.cli import main
from tests.support.recorded_run import Recorded

CODE = """
from pathlib import Path

Path({mark!r}).touch()


def advantages(batch, arrays):
    return batch.loss_mask * 1.0
"""


@pytest.mark.parametrize("verb", [["--verify"], ["--set", "trainer.optimizer.learning_rate=0.5", "--name", "b"]])
def test_a_recordings_code_runs_only_when_it_is_trusted(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: list[str]
) -> None:
    mine, mark = tmp_path / "recording", tmp_path / "it-ran"
    shutil.copytree(recorded.path, mine)
    (tmp_path / "evil.py").write_text(CODE.format(mark=str(mark)))
    config = json.loads((mine / "config.json").read_text())
    config["loss"]["advantage"] = f"{tmp_path}/evil.py:advantages"
    (mine / "config.json").write_text(json.dumps(config))
    command = ["replay", str(mine), *verb, "--dir", str(tmp_path / "runs")]
    assert main(command) == 1
    assert "--trust-code" in capsys.readouterr().err
    assert not mark.exists()
    main([*command, "--trust-code"])
    assert mark.exists()
