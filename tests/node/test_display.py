"""What a contributor sees: whoever stops reading it stops nothing."""

from __future__ import annotations

import errno
import io
import sys

import pytest

from coordinator.rounds.events import Instant
from node.display import Display
from node.session.view import View

VIEW = View(
    state="training", round=3, epoch=0, step=1, h=10, tokens_per_s=0.0, inner_loss=0.0, digest=b"", accepted=2,
    rejected={}, waiting_for="", since=Instant(0.0), role="member", paused_by=(), reachable=True,
)  # fmt: skip


class Broken(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def write(self, _: str) -> int:
        raise self._error


@pytest.mark.parametrize("error", [BrokenPipeError(errno.EPIPE, "gone"), OSError(errno.ENOSPC, "full")])
def test_a_reader_that_left_or_a_full_disk_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], error: OSError
) -> None:
    monkeypatch.setattr(sys, "stderr", Broken(error))
    display = Display(lambda: VIEW, lambda: 0.0)
    for _ in range(2):
        display.say("a line")
        display._plain()
