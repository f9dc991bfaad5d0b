"""What a trainer has to say of how it computes is heard wherever versions are trained, not in a run alone."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from streamrl.bus import connect
from streamrl.bus.server import NatsServer
from streamrl.data.model import ensure_model
from streamrl.history.tap import TapSettings, tap
from streamrl.runtime.worker import Worker
from tests.history.test_command_line import train
from tests.support.compilers import without_compiler
from tests.support.harness import make_run
from tests.support.printed import printed
from tests.support.torch_runs import limited

pytestmark = [
    pytest.mark.nats,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]
SAID = "the layers are not compiled, so that training is slower: "


def test_replay_branch_and_tap_say_what_a_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine whose compiler is missing."""
    config = limited(tmp_path, 0)
    run, config = make_run(tmp_path, replace(config, run=replace(config.run, steps=2)))
    ensure_model(config, run.model_dir)
    asyncio.run(train(config, run))
    compiled = replace(config, trainer=replace(config.trainer, compile="on", attention="packed"))
    run.write_config(compiled)
    with without_compiler():
        capsys.readouterr()
        here = (run.name, "--dir", str(tmp_path), "--json")
        for words in (("replay", *here), ("replay", *here, "--set", "loss.clip_low=0.1")):
            assert printed(capsys, *words).err.count(f"notice: {SAID}") == 1, words

        async def tapped() -> list[str]:
            said: list[str] = []
            server = NatsServer(run.bus_store)
            address = server.start()
            try:
                bus = await connect(address, run.name, compiled.bus)
                await tap(Worker(config=compiled, run_dir=run, bus=bus, kind="trainer", index=1), TapSettings(name="late"), say=said.append)
                await bus.close()
            finally:
                server.stop()
            return said

        assert [text.startswith(SAID) for text in asyncio.run(tapped())] == [True]
