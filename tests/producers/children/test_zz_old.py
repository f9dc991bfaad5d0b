from __future__ import annotations

import pytest

from streamrl.producers.children.cores import Cores, Had
from tests.producers.children.test_graders import test_a_quick_grader_whose_process_gets_no_core_does_not_hang as real

pytestmark = pytest.mark.process


@pytest.mark.parametrize("n", range(3))
async def test_old(workshop, monkeypatch, n):
    monkeypatch.setattr(Cores, "look", lambda self, state=False: Had())
    await real(workshop)
