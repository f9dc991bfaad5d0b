"""The names of `streamrl.algorithms`."""

import subprocess
import sys

import pytest

import streamrl.algorithms


def test_every_name_is_there_and_none_is_a_module() -> None:
    for name in streamrl.algorithms.__all__:
        assert callable(getattr(streamrl.algorithms, name)), name
    assert dir(streamrl.algorithms) == streamrl.algorithms.__all__ == sorted(streamrl.algorithms.__all__)
    with pytest.raises(AttributeError, match="no attribute 'gpro'"):
        _ = streamrl.algorithms.gpro


@pytest.mark.process
def test_what_needs_no_torch_loads_none() -> None:
    code = "import sys; from streamrl.algorithms import TrainBatch, token_advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
