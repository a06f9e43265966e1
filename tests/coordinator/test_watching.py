"""What an operator sees of a run that is served."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from coordinator import display, watching
from coordinator.display import LiveDisplay, PlainDisplay, Row, ServingDisplay
from coordinator.watching import watch
from tests.coordinator import test_simulate

STATUS = {
    "round": 3, "phase": "train", "members": [], "tokens": 5, "val_loss": None, "waiting_for": "alice",
    "empty_rounds": 3, "empty_reason": "nobody has a seat",
}  # fmt: skip


def row(number: int, loss: float | None) -> dict[str, Any]:
    return test_simulate.row(number, loss=loss)


class Events:
    """Events that have happened, then none."""

    def __init__(self, *events: tuple[str, Any]) -> None:
        self._left = deque(events)

    async def next(self) -> tuple[str, Any]:
        if not self._left:
            await asyncio.Event().wait()
        return self._left.popleft()


class Seen:
    """A display that remembers, and ends the watching once it has been told so many times."""

    def __init__(self, n_updates: int) -> None:
        self.rows: list[list[Row]] = []
        self._n_updates = n_updates

    def say(self, text: str) -> None:
        raise AssertionError(text)

    def update(self, status: Mapping[str, Any], rows: Sequence[Row]) -> None:
        assert status is STATUS
        self.rows.append(list(rows))
        if len(self.rows) == self._n_updates:
            raise EOFError

    def close(self) -> None: ...


def seen(n_updates: int, *events: tuple[str, Any]) -> list[list[Row]]:
    shown = Seen(n_updates)
    with pytest.raises(EOFError):
        asyncio.run(watch(Events(*events), lambda: STATUS, shown))
    return shown.rows


def test_each_committed_round_is_shown_and_again_when_more_is_known() -> None:
    first, second, later = row(1, None), row(2, None), row(1, 5.0)
    empty = row(3, None) | {"outcome": "empty", "reason": "nobody has a seat"}
    *_, last = seen(4, ("round", first), ("round", second), ("say", {"text": "x"}), ("round", later))
    assert last == [later, second]
    *_, last = seen(2, ("round", first), ("round", empty))
    assert last == [first]


def test_what_is_held_of_a_long_run_is_bounded() -> None:
    n = 3 * display.ROUNDS_SHOWN
    *_, last = seen(n, *(("round", row(number, 1.0)) for number in range(1, n + 1)))
    assert [each["round"] for each in last] == list(range(n - display.ROUNDS_SHOWN + 1, n + 1))


def test_without_news_the_status_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_S", 0.001)
    assert seen(3) == [[], [], []]


def test_plain_lines_say_at_times_what_is_awaited(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    shown = PlainDisplay()
    shown.update(STATUS, [])
    said = capsys.readouterr().err
    assert "round 3 · train" in said
    assert "waits for alice" in said
    assert "3 rounds in a row were empty: nobody has a seat" in said


def test_a_new_epochs_rounds_are_shown_though_their_numbers_are_lower(capsys: pytest.CaptureFixture[str]) -> None:
    shown = PlainDisplay()
    shown.update(STATUS, [row(7, 1.0)])
    shown.update(STATUS, [row(7, 1.0), row(6, 2.0) | {"epoch": 1}])
    assert [line.partition(":")[0] for line in capsys.readouterr().err.splitlines()] == ["round 7", "round 6"]


def test_on_a_terminal_what_is_said_stays_above_the_table() -> None:
    screen = io.StringIO()
    shown = LiveDisplay(Console(file=screen, force_terminal=True, width=100), keeps=True)
    for number in range(20):
        shown.say(f"line {number} [bold]")
    shown.update(STATUS, [])
    shown.close()
    assert all(f"line {number} [bold]" in screen.getvalue() for number in range(20))


def test_a_name_that_looks_like_markup_is_a_name() -> None:
    member = {
        "peer": "p" * 10, "name": "[/x]", "state": "[bold", "step": 1, "tokens_per_s": 1.0, "reachable": True,
        "last_seen_s": 1.0,
    }  # fmt: skip
    screen = io.StringIO()
    console = Console(file=screen, width=120)
    console.print(display.member_table({"members": [member]}))
    console.print(display.round_table([row(1, 1.0) | {"outcome": "empty", "reason": "[/y]"}]))
    assert all(word in screen.getvalue() for word in ("[/x]", "[bold", "[/y]"))


def test_a_display_that_stands_still_or_fails_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that nobody reads: Ctrl-S, or a laptop that is asleep."""
    free, said = threading.Event(), list[str]()

    class Stuck:
        def say(self, text: str) -> None:
            free.wait()
            said.append(text)
            raise RuntimeError("and it fails")

        def update(self, status: Mapping[str, Any], rows: Sequence[Row]) -> None: ...

        def close(self) -> None:
            raise RuntimeError("it fails again")

    monkeypatch.setattr(display, "open_display", lambda *, keeps: Stuck())
    monkeypatch.setattr(display, "CLOSE_S", 0.01)
    shown = ServingDisplay()
    shown.open()
    thread = shown._thread
    assert thread is not None
    n = 3 * display.WAITING_MOST
    for number in range(n):
        shown.say(str(number))
        shown.update(STATUS, [])
    shown.close()
    assert not said
    free.set()
    assert shown._thread is None
    thread.join(60)  # it goes on with what waits, though each fails, and ends
    assert not thread.is_alive()
    assert len(said) > 1


def test_before_it_is_opened_lines_are_plain(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "CLOSE_S", 60.0)  # its thread shows all that it was given
    shown = ServingDisplay()
    shown.say("first")
    shown.update(STATUS, [row(1, 1.0)])
    shown.open()
    shown.update(STATUS, [row(1, 1.0)])
    shown.close()
    shown.say("last")
    lines = capsys.readouterr().err.splitlines()
    assert (lines[0], lines[1].partition(":")[0], lines[2]) == ("first", "round 1", "last")
