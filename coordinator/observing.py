"""Starts the run's observer: `python -m node observe`, a node without a seat, on this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.admission import Admission, make_token
from coordinator.children import Child, Process
from coordinator.folder import PRIVATE, RunFolder, write_whole
from coordinator.leading.ports import Clock
from protos.messages import PeerId
from protos.signing import Identity

TOKEN_FILE = "observer-token"
TOKEN_S = 3600.0


@dataclass(frozen=True, slots=True)
class ObserverOrder:
    """How the observer is to be started."""

    invite: str  # reaches the coordinator from this machine
    listen: str
    dht: str
    advertise: str  # the host that others are told; empty: what the node finds


Launch = Callable[[RunFolder, ObserverOrder], Awaitable[Process]]
"""Starts the observer of the run in this folder; its token is there."""


async def launch(folder: RunFolder, order: ObserverOrder) -> Process:
    """As a process."""
    arguments = [
        "observe",
        order.invite,
        "--data",
        str(folder.observer),
        "--run-dir",
        str(folder.path),
        "--listen",
        order.listen,
        "--dht",
        order.dht,
    ]
    if order.advertise:
        arguments += ["--advertise", order.advertise]
    return await Child.start("node", arguments, folder.logs / "observer.log")


def starter(
    folder: RunFolder,
    run: PeerId,
    identity: Identity,
    admission: Admission,
    clock: Clock,
    order: ObserverOrder,
    launch: Launch,
) -> Callable[[], Awaitable[Process]]:
    """Starts an observer, with a fresh token that lets it, and nobody else, in as the observer.

    The token is in a file of the run's folder that only its owner may read: arguments are for all to see.
    """

    async def start() -> Process:
        token, serial = make_token(identity, run, uses=1, valid_s=TOKEN_S, run_time_s=clock.run_time_s())
        write_whole(folder.path / TOKEN_FILE, token, mode=PRIVATE)
        admission.expect_observer(serial)
        return await launch(folder, order)

    return start
