from __future__ import annotations

import os

import pytest

from streamrl.runtime.beats import LOADS, RUNS, VARIABLE, Pulse, Silence


class Listener:
    """Looks at a `Silence` ten times a second, on a clock of its own."""

    def __init__(self, limit_s: float = 60.0, loading_s: float = 600.0) -> None:
        self.now_s = 100.0
        self.silence = Silence(limit_s, loading_s, self.now_s)

    def hear(self, beat: str, seconds: float, *, every_s: float = 0.1) -> str:
        why = ""
        for _ in range(round(seconds / every_s)):
            self.now_s += every_s
            why = self.silence.look(beat, self.now_s)
        return why


def test_who_is_not_heard_is_silent_after_the_limit_unless_the_watcher_missed_it() -> None:
    listener = Listener()
    assert listener.hear(RUNS, 1000.0) == ""
    assert listener.hear("", 59.0) == ""
    assert listener.hear("", 2.0) == "silent for 60 s"
    listener = Listener()
    listener.hear(RUNS, 1.0)
    assert listener.hear("", 30.0) == ""
    listener.now_s += 3600.0  # stopped, or suspended
    assert listener.silence.look("", listener.now_s) == ""
    assert listener.silence.seconds == pytest.approx(31.0)
    listener = Listener(limit_s=0.0)
    listener.hear(RUNS, 1.0)
    assert listener.hear("", 10_000.0, every_s=1.0) == ""


def test_a_load_is_no_silence_but_one_without_end_is_too_long() -> None:
    listener = Listener()
    assert listener.hear("", 90.0) == ""
    assert listener.hear(LOADS, 10.0) == ""
    assert listener.hear("", 490.0) == ""
    assert listener.hear("", 20.0) == "loading for 600 s"
    listener = Listener(loading_s=100.0)
    listener.hear(LOADS, 99.0)
    assert listener.hear(RUNS, 500.0) == ""
    assert listener.hear(LOADS, 99.0) == ""  # an engine whose server is started again
    assert listener.hear(LOADS, 2.0) == "loading for 100 s"


def test_beats_go_through_the_pipe_that_the_environment_names_and_never_block() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    surroundings = {VARIABLE: str(writing)}
    pulse = Pulse.of(surroundings)
    assert surroundings == {}
    assert not os.get_inheritable(writing)
    pulse.beat(loading=True)
    pulse.beat(loading=False)
    assert os.read(reading, 16) == b"lr"
    for _ in range(1 << 17):  # more than a pipe holds
        pulse.beat(loading=False)
    os.close(reading)
    pulse.beat(loading=False)
    os.close(writing)


@pytest.mark.parametrize("named", ["", "no", "-1", "99999"])
def test_without_a_pipe_nobody_listens(named: str) -> None:
    Pulse.of({VARIABLE: named}).beat(loading=True)
