"""The numerics fingerprint, and that the table backend gets by without torch."""

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from streamrl.config.tree import Config, TrainerConfig
from streamrl.trainers.fingerprint import fingerprint_difference, fingerprint_digest, numerics_fingerprint


def test_the_digest_depends_on_whatever_changes_digits() -> None:
    assert fingerprint_digest({"a": "1", "b": "2"}) == fingerprint_digest({"b": "2", "a": "1"})
    assert fingerprint_digest({"a": "1", "b": "2"}) != fingerprint_digest({"a": "2", "b": "1"})
    config = Config()
    base = numerics_fingerprint(config)
    assert {"torch", "device", "capability", "threads", "mkldnn", "numpy", "processor", "dtype"} <= set(base)
    other = msgspec.structs.replace(config, trainer=TrainerConfig(minibatches=2, micro_tokens=64))
    difference = fingerprint_difference(numerics_fingerprint(other), base)
    assert difference == ["micro_tokens: 64 here, 16384 there", "minibatches: 2 here, 1 there"]
    assert numerics_fingerprint(config) == base


@pytest.mark.process
def test_the_table_backend_imports_no_torch(table_dir: Path) -> None:
    code = """
import sys
from pathlib import Path
from streamrl.config.tree import Config, TrainerConfig
from streamrl.trainers.factory import make_trainer
from streamrl.trainers.fingerprint import fingerprint_digest, numerics_fingerprint
config = Config(trainer=TrainerConfig(backend="table"))
make_trainer(config, Path(sys.argv[1]))
assert len(fingerprint_digest(numerics_fingerprint(config))) == 16
assert not {"torch", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, str(table_dir)], check=True)
