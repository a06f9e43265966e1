"""How progress and results look: a live display on a terminal, plain lines elsewhere, both on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, Full, Queue
from threading import Thread
from typing import Any, Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 20.0
"""Without news a plain line says so often what is awaited."""
ROWS_HELD = 2
"""So many rounds wait for their validation loss, as they stand in order."""
SAID_SHOWN = 6
WAITING_MOST = 64
CLOSE_S = 1.0
ROUNDS_SHOWN = 8

Row = Mapping[str, Any]


class Display(Protocol):
    """Progress of a run as it is watched."""

    def say(self, text: str) -> None: ...

    def update(self, status: Mapping[str, Any], rows: Sequence[Row]) -> None:
        """The run now: the contract's status, and its rounds so far."""

    def close(self) -> None: ...


def open_display(*, keeps: bool = False) -> Display:
    """For this process's standard error. `keeps`: what is said stays above a live display, as a log does."""
    console = Console(stderr=True)
    return LiveDisplay(console, keeps=keeps) if console.is_terminal else PlainDisplay()


def say_plainly(text: str) -> None:
    """A line of progress. That nobody can read it, or its file's disk is full, is no reason to stop."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


class PlainDisplay:
    """Lines: each round once, and what is awaited when nothing happens."""

    def __init__(self) -> None:
        self._shown = (0, 0)
        self._held: Sequence[Row] = ()
        self._said_at = time.monotonic()

    def say(self, text: str) -> None:
        say_plainly(text)
        self._said_at = time.monotonic()

    def update(self, status: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self._held = [row for row in rows if _place(row) > self._shown]
        while self._held and (self._held[0]["val_loss"] is not None or len(self._held) > ROWS_HELD):
            self._show(self._held[0])
            self._held = self._held[1:]
        if time.monotonic() - self._said_at >= LINE_EVERY_S:
            self.say(status_line(status))

    def close(self) -> None:
        for row in self._held:
            self._show(row)

    def _show(self, row: Row) -> None:
        self._shown = _place(row)
        self.say(round_line(row))


class LiveDisplay:
    """A table that is redrawn in place: the round, the members, the last rounds, and what was said last."""

    def __init__(self, console: Console, *, keeps: bool = False) -> None:
        self._console, self._keeps = console, keeps
        self._said: list[str] = []
        self._status: Mapping[str, Any] | None = None
        self._rows: Sequence[Row] = ()
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._live.start()

    def say(self, text: str) -> None:
        if self._keeps:
            with suppress(OSError, SystemExit):  # rich leaves the process where a pipe is broken
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        self._said = [*self._said, text][-SAID_SHOWN:]
        self._draw()

    def update(self, status: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self._status, self._rows = status, [row for row in rows if row["round"]]
        self._draw()

    def close(self) -> None:
        self._live.stop()

    def _draw(self) -> None:
        parts: list[Text | Table] = []
        if self._status is not None:
            parts += [Text(status_line(self._status), style="bold"), member_table(self._status)]
        if self._rows:
            parts.append(round_table(self._rows[-ROUNDS_SHOWN:]))
        parts += [Text(text, style="dim") for text in self._said]
        self._live.update(Group(*parts))


class ServingDisplay:
    """Plain lines until what has to stay on the screen, an invite say, is there; from `open` on whatever fits it.

    From then on a thread of its own writes: a terminal that nobody reads (a laptop asleep, Ctrl-S) makes a writer wait,
    and the run must not wait with it. What it can't show in time is dropped.
    """

    def __init__(self) -> None:
        self._todo: Queue[Callable[[Display], None] | None] | None = None
        self._thread: Thread | None = None

    def open(self) -> None:
        self._todo = Queue(WAITING_MOST)
        self._thread = Thread(target=_draw, args=(self._todo,), name="display", daemon=True)
        self._thread.start()

    def say(self, text: str) -> None:
        if self._todo is None:
            say_plainly(text)
        else:
            self._add(lambda display: display.say(text))

    def update(self, status: Mapping[str, Any], rows: Sequence[Row]) -> None:
        self._add(lambda display: display.update(status, rows))

    def close(self) -> None:
        """Wait a moment for what is being shown."""
        todo, thread = self._todo, self._thread
        self._todo = self._thread = None
        if todo is None or thread is None:
            return
        while True:
            try:
                todo.put_nowait(None)
                break
            except Full:
                with suppress(Empty):
                    todo.get_nowait()
        thread.join(CLOSE_S)

    def _add(self, task: Callable[[Display], None]) -> None:
        if self._todo is not None:
            with suppress(Full):
                self._todo.put_nowait(task)


def _draw(todo: Queue[Callable[[Display], None] | None]) -> None:
    display = open_display(keeps=True)
    while (task := todo.get()) is not None:
        with suppress(Exception):  # that somebody can't see the run is no reason to end anything
            task(display)
    with suppress(Exception):
        display.close()


# -- words ---------------------------------------------------------------------------------------------------------


def _place(row: Row) -> tuple[int, int]:
    return int(row["epoch"]), int(row["round"])


def figure(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def size(n_bytes: float | None) -> str:
    if n_bytes is None:
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if n_bytes < 1000:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:.1f} TB"


def exchanged(row: Row) -> int | None:
    """Bytes that the members sent on exchange streams in a round, as far as they have reported."""
    known = [member["bytes_sent"] for member in row["members"] if member["bytes_sent"] is not None]
    return sum(known) if known else None


def status_line(status: Mapping[str, Any]) -> str:
    members = [each for each in status["members"] if not each.get("observer") and each["state"] != "gone"]
    rate = sum(member["tokens_per_s"] for member in members)
    deadline = status.get("deadline_in_s")
    waiting = status.get("waiting_for") or ""
    n_empty = status.get("empty_rounds", 0)
    return (
        f"round {status['round']} · {status['phase']}"
        + (f" · {deadline:.0f} s left" if deadline is not None else "")
        + f" · {len(members)} members · {rate:,.0f} tokens/s · {status['tokens']:,} tokens"
        + f" · validation loss {figure(status['val_loss'])}"
        + (f" · waits for {waiting}" if waiting else "")
        + (f" · {n_empty} rounds in a row were empty: {status['empty_reason']}" if n_empty > 1 else "")
    )


def round_line(row: Row) -> str:
    accepted = sum(1 for member in row["members"] if member["accepted"])
    if row["outcome"] == "empty":
        return f"round {row['round']}: empty ({row['reason'] or 'no reason given'})"
    failed = len(row["failed_attempts"])
    return (
        f"round {row['round']}: {accepted} of {len(row['members'])} counted, "
        f"loss {figure(row['inner_loss'])}, validation loss {figure(row['val_loss'])}, "
        f"{size(exchanged(row))} exchanged"
        + (f", by {row['fallback']} instead of the run's rule" if row["fallback"] else "")
        + (f", {row['degraded']}" if row["degraded"] else "")
        + (f", {failed} failed attempts" if failed else "")
    )


def member_table(status: Mapping[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("member", "name", "state", "step", "tokens/s", "reachable", "seen"):
        table.add_column(name, justify="right" if name in ("step", "tokens/s", "seen") else "left")
    reachable = {True: "yes", False: "dials out", None: "–"}
    for member in status["members"]:
        seen = member["last_seen_s"]
        table.add_row(
            str(member["peer"])[-6:],
            Text("observer" if member.get("observer") else str(member["name"])),  # a name may look like markup
            Text(str(member["state"])),
            str(member["step"]),
            f"{member['tokens_per_s']:,.0f}",
            reachable[member["reachable"]],
            "–" if seen is None else f"{seen:.0f} s",
        )
    return table


def round_table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("round", "outcome", "counted", "loss", "validation loss", "‖Δ‖", "exchanged", "train", "exchange"):
        table.add_column(name, justify="left" if name == "outcome" else "right")
    for row in rows:
        seconds = row["seconds"]
        accepted = sum(1 for member in row["members"] if member["accepted"])
        table.add_row(
            str(row["round"]),
            Text(str(row["outcome"]) if row["outcome"] == "committed" else f"empty: {row['reason']}"),
            f"{accepted}/{len(row['members'])}",
            figure(row["inner_loss"]),
            figure(row["val_loss"]),
            figure(row["delta_norm"]),
            size(exchanged(row)),
            "–" if seconds["train"] is None else f"{seconds['train']:.1f} s",
            "–" if seconds["exchange"] is None else f"{seconds['exchange']:.1f} s",
        )
    return table


def loss_curve(points: Sequence[tuple[int, float]], width: int = 72, height: int = 15) -> str:
    """Validation loss by round, drawn with characters; empty where there is nothing to draw."""
    if len(points) < 2:
        return ""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot([x for x, _ in points], [y for _, y in points], marker="braille")
    plotext.title("validation loss by round")
    plotext.xticks([x for x, _ in points] if len(points) <= 12 else None)
    return str(plotext.build())


def print_summary(result: Mapping[str, Any], place: object, *, kept: bool) -> None:
    """The end of a simulation, on standard output: what each round did, the curve, and where things are."""
    console = Console()
    rows = result["rounds"]
    console.print(round_table(rows))
    initial = result["initial_val_loss"]
    points = [(int(row["round"]), float(row["val_loss"])) for row in rows if row["val_loss"] is not None]
    curve = loss_curve(points)
    if curve:
        console.print(Text.from_ansi(curve))
    committed = sum(1 for row in rows if row["outcome"] == "committed")
    summary = Table(box=None, pad_edge=False, show_header=False)
    sent = [exchanged(row) for row in rows]
    for name, value in (
        ("run", str(result["run_id"])),
        ("rounds", f"{committed} committed with {result['nodes']} nodes in {result['seconds']:.0f} s"),
        ("validation loss", f"{figure(initial)} → {figure(result['val_loss'])}"),
        ("tokens", f"{rows[-1]['tokens']:,}" if rows else "0"),
        ("exchanged", size(sum(n for n in sent if n is not None))),
        ("digests", "equal in every round" if result["digests_equal"] else "NOT EQUAL in every round"),
        ("model", f"{result['export']} (transformers.AutoModelForCausalLM.from_pretrained)"),
        ("ledger and logs", str(place) + ("" if kept else " (--data DIR keeps the whole run)")),
    ):
        summary.add_row(name, Text(value))
    console.print(summary)
