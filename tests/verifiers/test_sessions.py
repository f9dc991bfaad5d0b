"""A guest plays a taskset over a gateway: what arrives on the stream, and what becomes of episodes that go wrong."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from streamrl.bridges.verifiers.worker import main
from streamrl.config.gateway import GatewayConfig
from streamrl.config.tree import ProducerConfig, TasksConfig
from streamrl.errors import ConfigError
from streamrl.schemas.codec import encode
from streamrl.schemas.samples import Sample, Status
from streamrl.schemas.tasks import RolloutTask, Sampling
from tests.support.errors import raises
from tests.support.gateways import gateway
from tests.support.needs import need, openenv_python
from tests.support.processes import until
from tests.support.producing import Loop, samples_in, tombstones_in

TASKSET = Path(__file__).with_name("tasks.py")
LONG_S = 150.0
"""Enough for verifiers to be loaded three times on a machine that is busy with other work."""

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]


def with_taskset(loop: Loop, python: str, folder: Path, *modes: str) -> None:
    options = {
        "taskset": {"folder": str(folder), "modes": list(modes)},
        "agent": {"harness": {"id": "tasks"}},
        "traces": str(folder / "traces"),
    }
    producer = ProducerConfig(function=f"verifiers:{TASKSET}", python=python, options=options, concurrency=len(modes), idle_timeout_s=15.0)
    tasks = replace(TasksConfig(), num_rollouts=1)
    loop.config = replace(loop.config, producer=producer, tasks=tasks)


async def issue(loop: Loop, python: str, folder: Path, *modes: str, taskset: tuple[str, ...] = ()) -> None:
    """A task for each mode, named as the rows of the taskset name it, whose modes are these or others."""
    with_taskset(loop, python, folder, *(taskset or modes))
    for index, mode in enumerate(modes):
        task = RolloutTask(
            run=loop.config.run.name,
            index=index,
            source="main",
            prompt_ids=tuple(loop.tokenizer.encode("<|user|>3+4<|end|><|assistant|>")),
            prompt="3+4",
            metadata={"verifiers": {"idx": index, "key": f"task of {mode}"}},
            sampling=Sampling(max_new_tokens=8),
            seed=index,
        )
        await loop.bus.publish(loop.subjects.tasks("main"), encode(task), expect_last=index)


@contextlib.asynccontextmanager
async def played(loop: Loop, **config: Any) -> AsyncIterator[None]:
    """The gateway, and a worker of the taskset."""
    async with gateway(loop, **config):
        own = replace(loop.config, gateway=GatewayConfig(**{"workers": 1, **config}))
        async with loop.serving(main, loop.worker(kind="producer", config=own)):
            yield


def trained(sample: Sample) -> list[tuple[int, float]]:
    """Tokens and log-probs that are trained on."""
    return [(token, logprob) for token, logprob, mask in zip(sample.tokens, sample.logprobs, sample.loss_mask, strict=True) if mask]


async def test_branches_of_a_trace_are_the_samples_on_the_stream(loop: Loop, python: str, tmp_path: Path) -> None:
    await issue(loop, python, tmp_path, "right", "fork")
    async with played(loop):
        samples = samples_in(await loop.records(2, timeout_s=LONG_S))
        await loop.queue_is_empty()
    traces = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "traces").iterdir()}
    assert sorted(traces) == ["0.0", "1.0"]
    for task, num_branches in ((0, 1), (1, 2)):
        branches, found = traces[f"{task}.0"]["branches"], [sample for sample in samples if sample.task == task]
        assert len(branches) == len(found) == num_branches
        once: list[tuple[int, float]] = []
        for number, (branch, sample) in enumerate(zip(branches, found, strict=True)):
            size = len(sample.tokens)
            assert list(sample.tokens) == branch["token_ids"][:size]
            columns = zip(branch["token_ids"], branch["logprobs"], branch["sampled_mask"], strict=True)
            sampled = [(token, logprob) for token, logprob, mask in list(columns)[:size] if mask]
            # What branches share is sampled in each of them and trained in the first.
            assert sampled == once[: len(sampled) - len(trained(sample))] + trained(sample)
            once = once or sampled
            # The last turn of a branch that the agent has left is not trained: nobody went on from it.
            is_left = number + 1 < num_branches
            assert any(branch["sampled_mask"][size:]) == is_left and (size < len(branch["token_ids"])) == is_left
        assert {sample.reward for sample in found} == {1.0}
        assert found[0].reward_parts == {"worth": 1.0}
    assert samples[0].status is Status.COMPLETED


async def test_episodes_that_go_wrong_end_with_the_reason(loop: Loop, python: str, tmp_path: Path) -> None:
    modes = ("right", "nan", "raises", "silent", "hangs")
    await issue(loop, python, tmp_path, *modes, "other", taskset=(*modes, "changed"))
    async with played(loop, idle_timeout_s=25.0):
        records = await loop.records(6, timeout_s=LONG_S)
        await loop.queue_is_empty()
    assert [sample.task for sample in samples_in(records)] == [0]
    ended = {stone.task: (stone.reason, stone.detail) for stone in tombstones_in(records)}
    for task, (mode, reason, said) in enumerate(
        [
            ("nan", "failed", "expected a finite reward, got nan"),
            ("raises", "failed", "the grader is broken"),
            ("silent", "failed", "the taskset gave no reward"),
            ("hangs", "timeout", "no call for"),
            ("other", "failed", "expected task 5 of the taskset to have the key task of other, got task of changed"),
        ],
        1,
    ):
        got = ended[task]
        assert said in got[1] or (mode == "hangs" and "made no call for" in got[1]), (mode, got)
        assert got[0] == reason or mode == "hangs", (mode, got)


async def test_a_guest_that_dies_is_replaced_and_its_sessions_go_on(loop: Loop, python: str, tmp_path: Path) -> None:
    await issue(loop, python, tmp_path, "dies_once", "right", "blocks_once")
    async with played(loop):
        records = await loop.records(3, timeout_s=2 * LONG_S)
        await loop.queue_is_empty()
    ends = {sample.task: "sample" for sample in samples_in(records)} | {stone.task: stone.detail for stone in tombstones_in(records)}
    assert ends[1] == "sample", "a neighbour of those that kill their guest"
    assert all(ends[task] == "sample" or "second that played it" in ends[task] for task in (0, 2)), ends


async def test_sessions_that_are_open_when_the_worker_drains_are_played_on(loop: Loop, python: str, tmp_path: Path) -> None:
    await issue(loop, python, tmp_path, "waits_once")
    async with gateway(loop):
        for number in range(2):
            worker = loop.worker(kind="producer", config=replace(loop.config, gateway=GatewayConfig(workers=1)))
            async with loop.serving(main, worker):
                if number:
                    [sample] = samples_in(await loop.records(1, timeout_s=LONG_S))
                else:
                    await until((tmp_path / "waits_once").exists, within_s=LONG_S)
    assert (sample.reward, len(trained(sample))) == (1.0, 2), "the same session, whose first call had been answered"


async def test_a_task_that_kills_every_guest_fails_with_the_signal(loop: Loop, python: str, tmp_path: Path) -> None:
    await issue(loop, python, tmp_path, "dies")
    async with played(loop):
        [stone] = tombstones_in(await loop.records(1, timeout_s=2 * LONG_S))
    assert stone.reason == "failed" and "SIGKILL" in stone.detail and "second that played it" in stone.detail


async def test_a_wrong_key_of_the_gateway_ends_the_worker(loop: Loop, python: str, tmp_path: Path) -> None:
    with_taskset(loop, python, tmp_path, "right")
    async with gateway(loop):
        loop.run_dir.gateway_key_path.write_text("another\n")
        with raises(ConfigError, key="producer.function"):
            await main(loop.worker(kind="producer", config=replace(loop.config, gateway=GatewayConfig(workers=1))))


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
