from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.support.gateways import gateway
from tests.support.needs import need, openenv_python
from tests.support.producing import Loop

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]


async def test_openenvs_probe_grades_a_session_as_trainable(loop: Loop) -> None:
    need("openenv")
    async with gateway(loop, prompts="any") as gate:
        await loop.issue(1, num_rollouts=1)
        session = await gate.start()
        said = [session[name] for name in ("base_url", "model", "api_key")]
        command = [openenv_python() or "", str(Path(__file__).with_name("probe.py")), *said]
        probe = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, cwd="/")
        output, _ = await probe.communicate()
    found = json.loads(output.splitlines()[-1])
    assert found["capture_level"] == "tokens" and found["ok"], found
    assert found["n_prompt_ids"] > 0 and found["n_completion_ids"] > 0
    assert not [finding for finding in found["findings"] if finding.startswith("[FATAL]")], found
