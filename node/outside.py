"""What a node is built upon, its clocks among them, and what tests put in its place."""

from __future__ import annotations

import datetime
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import IO

from node.peers.dht import Dht
from node.peers.grpc import GrpcPeers
from node.ports import Peers, Records
from node.training.link import Trainer
from node.training.process import TrainerProcess


@dataclass(frozen=True, slots=True)
class Outside:
    """What a node is built upon, and what others may put in its place: tests run many nodes in one process."""

    make_trainer: Callable[[IO[bytes]], Trainer] = lambda log: TrainerProcess(log=log)
    start_dht: Callable[..., Awaitable[Records]] = Dht.start
    make_peers: Callable[..., Peers] = GrpcPeers
    seconds: Callable[[], float] = time.monotonic
    """This machine's monotonic clock: what two of them show has nothing to do with each other."""
    today: Callable[[], datetime.datetime] = lambda: datetime.datetime.now(datetime.UTC)
    """The calendar, which volunteers' machines have wrong."""
    say: Callable[[str], None] | None = None
    """Takes what a contributor would want to read; None: standard error does."""
    owns_process: bool = True
    """Handle signals, and show progress on standard error."""


def clocks_off_by(offset_s: float) -> Outside:
    """The outside as a machine sees it whose clock and calendar are wrong by so many seconds."""
    return Outside(
        seconds=lambda: time.monotonic() + offset_s,
        today=lambda: datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=offset_s),
    )


MACHINE = Outside()
"""The machine as it is."""
