"""What a person sees of a full stream."""

from __future__ import annotations

from streamrl.monitor.screen import plain_line
from streamrl.monitor.view import RunView
from streamrl.schemas.control import WorkerPresence
from streamrl.schemas.events import Event

FULL = "stalled: stream full"


def test_status_and_live_view_say_who_is_stalled_until_it_goes_on() -> None:
    view = RunView("run", steps=10)
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer", state=FULL))
    view.event(Event(kind="stalled", worker="producer-0", detail={}))
    numbers = view.numbers(elapsed_s=1.0)
    assert [worker.state for worker in numbers.workers] == [FULL] and numbers.stalled == ("producer-0",)
    assert "stream-full=producer-0" in plain_line(numbers) and f"producer-0:{FULL}" in plain_line(numbers)
    view.worker("producer-0", WorkerPresence(worker="producer-0", kind="producer"))
    view.event(Event(kind="resumed", worker="producer-0", detail={}))
    assert "full" not in plain_line(view.numbers(elapsed_s=2.0))
