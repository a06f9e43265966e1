"""What ends a trainer process: its agent's word, in order, or the end of the pipe without one."""

from __future__ import annotations

import os
from queue import SimpleQueue
from threading import Event

import pytest

from node.training import trainer
from node.training.link import Command, Pause, Quit, Start, encode

START = Start("spec", "data", 1)


class Exited(BaseException):
    """In place of the end of this process."""


def read(monkeypatch: pytest.MonkeyPatch, *commands: Command, started: bool) -> list[Command]:
    """What comes out of a pipe with these commands in it, whose other end is closed."""

    def exits(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", exits)
    out, into = os.pipe()
    try:
        os.write(into, b"".join(encode(command) for command in commands))
        os.close(into)
        found: SimpleQueue[Command] = SimpleQueue()
        has_started = Event()
        if started:
            has_started.set()
        trainer._read(out, found, has_started)
    finally:
        os.close(out)
    return [found.get_nowait() for _ in range(found.qsize())]


def test_a_quit_is_carried_out_in_order_though_the_pipe_closes_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, START, Pause(), Quit(), started=True) == [START, Pause(), Quit()]


def test_a_pipe_that_closes_without_one_ends_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exited, match="1"):
        read(monkeypatch, START, Pause(), started=True)


def test_a_quit_ends_one_that_is_still_starting_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exited, match="0"):
        read(monkeypatch, START, Quit(), started=False)
