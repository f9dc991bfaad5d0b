import asyncio
import errno
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from streamrl.config.tree import Config, SuperviseConfig
from streamrl.errors import LaunchError
from streamrl.launch.local import LocalLauncher
from streamrl.launch.sidecars import Sidecar, Sidecars
from streamrl.launch.supervisor import Supervisor
from streamrl.launch.up import START_ORDER
from streamrl.runtime.rundir import RunDir
from streamrl.runtime.service import describe_exit
from tests.support.processes import alive, read_pids, until
from tests.support.runs import bare_run

pytestmark = pytest.mark.process


def restarted(worker: str, how: str, often: int | str, wait_s: float) -> str:
    return f"{worker} ended with {how}; restart {often} in {wait_s:g} s"


class Team:
    """A supervisor of shell scripts, with a clock that the test moves."""

    def __init__(self, run: RunDir, **settings: float) -> None:
        self.run = run
        self.notes: list[str] = []
        self.scripts: dict[str, str] = {}
        self.now_s = 0.0
        launcher = LocalLauncher(run, Config(), command=self._command)
        config = SuperviseConfig(**{"backoff_s": 0.5, "drain_s": 20.0, **settings})  # type: ignore[arg-type]
        self.supervisor = Supervisor(launcher, config, note=self.notes.append, clock=lambda: self.now_s)

    def start(self, kind: str, *scripts: str) -> None:
        for index, script in enumerate(scripts):
            self.scripts[f"{kind}-{index}"] = script
            self.supervisor.start(kind, index)

    def state(self, kind: str, index: int = 0) -> str:
        return self.supervisor.children[f"{kind}-{index}"].state

    def pid(self, kind: str, index: int = 0) -> int:
        return self.supervisor.children[f"{kind}-{index}"].process.pid

    def tick(self, now_s: float | None = None) -> None:
        self.now_s = self.now_s if now_s is None else now_s
        self.supervisor.tick()

    async def tick_until(self, kind: str, state: str, index: int = 0) -> None:
        def there() -> bool:
            self.tick()
            return self.state(kind, index) == state

        await until(there)

    async def tick_on(self) -> None:
        while True:
            self.tick()
            self.now_s += 0.5
            await asyncio.sleep(0.01)

    async def drain(self, **arguments: Sequence[str]) -> bool:
        """Drain while the clock runs a hundred times too fast."""

        async def run_clock() -> None:
            while True:
                await asyncio.sleep(0.01)
                self.now_s += 1.0

        clock = asyncio.create_task(run_clock())
        try:
            return await self.supervisor.drain(**arguments)  # type: ignore[arg-type]
        finally:
            clock.cancel()

    def _command(self, kind: str, index: int) -> Sequence[str]:
        return ("/bin/sh", "-c", self.scripts[f"{kind}-{index}"])


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return bare_run(tmp_path / "demo")


@pytest.fixture
async def team(run: RunDir) -> AsyncIterator[Team]:
    one = Team(run, max_restarts=2, window_s=100.0)
    yield one
    await one.supervisor.kill_all()


async def test_a_failed_worker_waits_longer_each_time_and_starts_again(team: Team) -> None:
    team.start("producer", "exit 1")
    await team.tick_until("producer", "waiting")
    first = team.pid("producer")
    team.tick(0.49)
    assert (team.state("producer"), team.pid("producer")) == ("waiting", first)
    team.tick(0.5)
    assert team.state("producer") == "running" and team.pid("producer") != first
    await team.tick_until("producer", "waiting")
    assert team.notes == [restarted("producer-0", "exit code 1", *often) for often in ((1, 0.5), (2, 1.0))]
    assert team.supervisor.lines()["producer-0"].restarts == 1


async def test_too_many_failures_end_with_the_log_and_a_hint_and_leave_the_others_alone(team: Team) -> None:
    team.start("trainer", "sleep 60")
    team.start("engine", "echo no such device; exit 1")
    with pytest.raises(LaunchError, match=r"engine-0 ended 3 times.*\n(no such device\n?){3}") as caught:
        await team.tick_on()
    assert "logs/engine-0.log" in caught.value.hint
    assert alive(team.pid("trainer"))


async def test_failures_long_ago_are_forgotten(team: Team) -> None:
    team.start("producer", "exit 1")
    for _ in range(5):
        await team.tick_until("producer", "waiting")
        team.now_s += 101.0
        await team.tick_until("producer", "running")
    assert {note.partition(";")[2] for note in team.notes} == {" restart 1 in 0.5 s"}


class Held:
    """A process that no signal ends, as one that hangs in the kernel."""

    pid, why = 4711, ""

    def poll(self) -> int | None:
        return None

    def heard(self) -> str:
        return ""

    def dump(self) -> None: ...

    def stop(self) -> None: ...

    def kill(self) -> None: ...


class HeldLauncher:
    def start(self, kind: str, index: int) -> Held:
        return Held()

    def tail(self, worker: str) -> str:
        return ""


async def test_a_process_that_no_kill_ends_is_said_and_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrl.launch.supervisor.KILLED_S", 0.2)
    notes: list[str] = []
    supervisor = Supervisor(HeldLauncher(), SuperviseConfig(drain_s=0.1), note=notes.append)
    supervisor.start("engine", 0)
    async with asyncio.timeout(60):
        assert not await supervisor.drain()
        await supervisor.kill_all()
    assert [note.partition(",")[0] for note in notes] == [
        "engine-0 did not stop within 0.1 s and is killed",
        "engine-0 (process 4711) has not ended 0.2 s after it was killed",
    ]


async def test_a_worker_that_is_retired_drains_and_is_not_started_again(team: Team) -> None:
    team.start("producer", "trap 'exit 0' TERM; while :; do sleep 0.05; done", "exec sleep 60")
    assert team.supervisor.retire("producer-0") and not team.supervisor.retire("producer-0")
    assert not team.supervisor.retire("producer-7")
    await team.tick_until("producer", "done")
    assert (team.state("producer", 1), team.notes) == ("running", [])
    await team.supervisor.kill_all()


async def test_an_exit_code_says_of_no_worker_that_its_work_is_over(team: Team) -> None:
    """The log gets a moment to say so."""
    kinds = START_ORDER
    for kind in kinds:
        team.start(kind, "exit 0")
    for kind in kinds:
        await team.tick_until(kind, "ended")
    team.tick(1.9)
    assert {team.state(kind) for kind in kinds} == {"ended"} and team.notes == []
    team.tick(2.0)
    assert {team.state(kind) for kind in kinds} == {"waiting"}
    assert [note.partition(" before ")[0] for note in team.notes] == [f"{kind}-0 ended with exit code 0" for kind in kinds]


async def test_a_signal_that_drains_a_trainer_stops_the_run_and_any_other_worker_is_started_again(team: Team) -> None:
    kinds = [kind for kind in START_ORDER if kind != "trainer"]
    for kind in kinds:
        team.start(kind, "exit 5")
        await team.tick_until(kind, "waiting")
    assert not team.supervisor.drained("trainer")
    team.start("trainer", "exit 0", "exit 5")
    await team.tick_until("trainer", "drained")
    assert team.supervisor.drained("trainer") == "trainer-0" and team.state("trainer", 1) == "drained"
    assert [note.partition(";")[0] for note in team.notes] == [
        f"{kind}-0 ended with exit code 5, told to drain by a signal that was not sent here" for kind in kinds
    ]


async def test_workers_get_their_threads_and_their_supervisor(team: Team) -> None:
    team.start("engine", "echo threads=$OMP_NUM_THREADS supervisor=$STREAMRL_SUPERVISOR; exit 0")
    await team.tick_until("engine", "ended")
    assert team.run.log_path("engine-0").read_text() == f"threads=1 supervisor={os.getpid()}\n"


async def test_a_drain_goes_in_order_and_lets_a_kind_finish(team: Team) -> None:
    order = team.run.path / "order"
    for kind in ("feeder", "engine", "evaluator", "producer", "trainer"):
        team.start(
            kind, f"trap 'sleep 0.1; echo {kind} >> {order}; exit 0' TERM; echo ready >> {order}; while :; do sleep 0.02 & wait $!; done"
        )
    await until(lambda: order.exists() and order.read_text().count("ready") == 5)
    assert await team.drain()
    assert order.read_text().split()[5:] == ["trainer", "producer", "evaluator", "engine", "feeder"]
    assert team.notes == []
    told = team.run.path / "told"
    team.start("evaluator", f"trap 'echo cut > {told}; exit 0' TERM; sleep 0.3; echo finished > {told}")
    assert await team.supervisor.drain(finish=("evaluator",))
    assert told.read_text() == "finished\n"


async def test_a_kind_that_should_finish_and_fails_is_said(team: Team) -> None:
    team.start("evaluator", "echo no engine answers; exit 1")
    await team.supervisor.drain(finish=("evaluator",))
    assert len(team.notes) == 1 and team.notes[0].startswith("evaluator-0 ") and team.notes[0].endswith(": no engine answers")


async def test_a_worker_that_does_not_stop_is_killed_with_what_it_started(team: Team) -> None:
    pids = team.run.path / "pids"
    team.start("engine", f"trap '' TERM; sleep 600 & echo $! >> {pids}; echo $$ >> {pids}; wait; while :; do sleep 1; done")
    await until(lambda: len(read_pids(pids)) == 2)
    assert not await team.drain()
    await until(lambda: not any(alive(pid) for pid in read_pids(pids)))
    assert [note[:31] for note in team.notes] == ["engine-0 did not stop within 20"]


async def test_what_a_dead_worker_leaves_behind_is_swept(team: Team) -> None:
    pids = team.run.path / "pids"
    team.start("trainer", f"sleep 600 & echo $! > {pids}; exit 1")
    await team.tick_until("trainer", "waiting")
    await until(lambda: not alive(read_pids(pids)[0]))


async def test_kill_all_ends_the_stubborn_too(team: Team) -> None:
    pids = team.run.path / "pids"
    for kind in ("trainer", "engine"):
        team.start(kind, f"trap '' TERM INT; echo $$ >> {pids}; while :; do sleep 1; done")
    await until(lambda: len(read_pids(pids)) == 2)
    await team.supervisor.kill_all()
    assert not any(alive(pid) for pid in read_pids(pids))


_ORPHANAGE = """
import asyncio, sys
from streamrl.config.tree import Config, SuperviseConfig
from streamrl.launch.local import LocalLauncher
from streamrl.launch.supervisor import Supervisor
from streamrl.runtime.rundir import RunDir

CHILD = '''
import os, sys, time
from streamrl.runtime.service import SUPERVISOR_VARIABLE, die_with_parent
die_with_parent(int(os.environ[SUPERVISOR_VARIABLE]))
with open(sys.argv[1], "a") as file:
    print(os.getpid(), file=file)
time.sleep(600)
'''

async def main(run, pids):
    launcher = LocalLauncher(run, Config(), command=lambda kind, index: (sys.executable, "-c", CHILD, pids))
    supervisor = Supervisor(launcher, SuperviseConfig(), note=print)
    supervisor.start("engine", 0)
    supervisor.start("trainer", 0)
    await asyncio.sleep(600)

asyncio.run(main(RunDir(sys.argv[1]), sys.argv[2]))
"""


async def test_no_worker_outlives_a_supervisor_that_is_killed(run: RunDir) -> None:
    pids = run.path / "pids"
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _ORPHANAGE, str(run.path), str(pids))
    try:
        await until(lambda: len(read_pids(pids)) == 2)
        assert all(alive(pid) for pid in read_pids(pids))
    finally:
        parent.kill()
        await parent.wait()
    await until(lambda: not any(alive(pid) for pid in read_pids(pids)))


def test_exits_are_described_and_the_end_of_a_log_is_read(beside: RunDir) -> None:
    assert [describe_exit(code) for code in (0, 3, -9, -99)] == ["exit code 0", "exit code 3", "signal SIGKILL", "signal 99"]
    beside.log_path("page-0").write_bytes("ä".encode() * 1_000_000 + b"\nerror: \xff no room\n\n")
    said = LocalLauncher(beside, Config()).tail("page-0")
    assert said.endswith("\nerror: \N{REPLACEMENT CHARACTER} no room") and len(said) <= 4096
    beside.log_path("page-1").write_text("\n".join(map(str, range(100))))
    assert LocalLauncher(beside, Config()).tail("page-1").splitlines() == [str(number) for number in range(85, 100)]
    beside.log_path("page-2").mkdir()
    beside.log_path("page-3").touch()
    assert [LocalLauncher(beside, Config()).tail(f"page-{number}") for number in (2, 3, 4)] == ["", "", ""]


async def test_a_rank_that_dies_takes_the_others_along_and_all_start_again(team: Team) -> None:
    team.start("trainer", "sleep 600", "sleep 600", "sleep 600")
    team.start("engine", "sleep 600")
    first = [team.pid("trainer", rank) for rank in range(3)]
    engine = team.pid("engine")
    os.kill(first[1], signal.SIGKILL)
    await team.tick_until("trainer", "ended", 1)
    assert [alive(pid) for pid in first] == [True, False, True]
    assert team.notes == []
    team.now_s = 2.0
    await team.tick_until("trainer", "waiting")
    assert [alive(pid) for pid in first] == [False] * 3
    assert team.notes == [restarted("trainer-1", "signal SIGKILL", "1 of all 3 trainers", 0.5)]
    team.tick(2.5)
    assert [team.state("trainer", rank) for rank in range(3)] == ["running"] * 3
    assert not set(first) & {team.pid("trainer", rank) for rank in range(3)}
    assert (team.pid("engine"), alive(engine)) == (engine, True)


async def test_failures_of_ranks_count_once(team: Team) -> None:
    team.start("trainer", "exit 1", "exit 1")
    with pytest.raises(LaunchError, match=r"trainer-[01] ended 3 times"):
        await team.tick_on()
    assert [child.restarts for child in team.supervisor.children.values()] == [2, 2]


async def test_a_rank_that_ends_with_exit_code_0_leaves_the_others_alone_until_all_have_ended(team: Team) -> None:
    go = team.run.path / "go"
    team.start("trainer", f"while [ ! -e {go} ]; do sleep 0.01; done; exit 0", "exit 0")
    await team.tick_until("trainer", "ended", 1)
    team.tick(1000.0)
    assert team.state("trainer") == "running"
    go.touch()
    await team.tick_until("trainer", "ended")
    assert team.notes == []
    team.tick(team.now_s + 2.0)
    assert [team.state("trainer", rank) for rank in range(2)] == ["waiting"] * 2 and len(team.notes) == 1


@pytest.mark.parametrize(
    ("script", "how", "words"),
    [
        ("kill -KILL $$", "signal SIGKILL", ("",)),
        ("echo full >&2; echo >&2; exit 1", "exit code 1", ("; its log ends: full",)),
        ("printf 'started\nerror: port taken\nhint: take another\n' >&2; exit 1", "exit code 1", ("port taken", "hint: take another")),
    ],
)
async def test_a_restart_says_how_and_with_which_last_words_it_ended(team: Team, script: str, how: str, words: tuple[str, ...]) -> None:
    team.start("engine", script)
    await team.tick_until("engine", "waiting")
    [note] = team.notes
    assert note.startswith(restarted("engine-0", how, 1, 0.5)) and words[0] in note and note.endswith(words[-1])
    team.scripts["engine-0"] = "exec sleep 600"
    for now_s, told in ((1.0, True), (20.0, True), (60.0, False)):
        team.tick(now_s)
        said = team.supervisor.lines()["engine-0"].said
        assert said.startswith(how) and said.endswith(words[-1].removeprefix("; its log ends: ")) if told else said == "", "it runs"


@pytest.mark.parametrize(
    ("scripts", "words"),
    [
        (("echo error: no such file; exit 2",), r"trainer-0 cannot run.*\n.*no such file"),
        (("echo error: the weights diverged; exit 4",), r"trainer-0 stopped: .* diverged.*\n"),
        # What one rank says of its configuration counts more than that the other failed.
        (("sleep 0.2; echo error: no such GPU; exit 2", "exit 1"), r"trainer-0 cannot run.*\n.*no such GPU"),
    ],
)
async def test_what_cannot_run_is_not_tried_twice(team: Team, scripts: tuple[str, ...], words: str) -> None:
    team.start("trainer", *scripts)
    with pytest.raises(LaunchError, match=words):
        await team.tick_until("trainer", "waiting")


@pytest.mark.parametrize("scripts", [("exit 3",), ("exit 3", "exit 1")])
async def test_a_fenced_worker_stays_down(team: Team, scripts: tuple[str, ...]) -> None:
    team.start("trainer", *scripts)
    await team.tick_until("trainer", "fenced")
    team.tick(team.now_s + 1000.0)
    assert [team.state("trainer", rank) for rank in range(len(scripts))] == ["fenced"] * len(scripts)
    assert [note.partition(": ")[0] for note in team.notes] == ["trainer-0 stopped"]


@pytest.fixture
def beside(tmp_path: Path) -> RunDir:
    beside = RunDir(tmp_path / "demo")
    beside.logs.mkdir(parents=True)
    return beside


async def test_what_one_meets_leaves_the_others_kept(beside: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[int] = []
    starts: list[bool] = []

    def fails(pid: int) -> None:
        looks.append(pid)
        raise OSError(errno.EMFILE, "too many open files")

    def command(again: bool) -> list[str]:
        starts.append(again)
        return [sys.executable, "-S", "-c", "raise SystemExit('error: over')"]

    notes: list[str] = []
    stays = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    both = [
        Sidecar(kind="page", called="the page", command=lambda again: stays, runs=fails),
        Sidecar(kind="sink-prometheus", called="the sink", command=command),
    ]
    config = Config(supervise=SuperviseConfig(backoff_s=0.0))
    async with Sidecars(both, beside, config, note=notes.append, drain_s=0.2).kept():
        await until(lambda: len(starts) >= 3, within_s=60)
    assert looks and "event=sidecar_look_failed kind=page" in caplog.text
    assert starts[:3] == [False, True, True]
    assert [note for note in notes if note.startswith("the sink")] == [
        "the sink ended with exit code 1; over; it is started again until it runs, and the run goes on"
    ]
