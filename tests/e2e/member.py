"""A member's place in a village: it joins, halts, dies, leaves and comes back with what is in its folder."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from node.app import join
from node.config import NodeOptions
from node.control import ask
from node.outside import Outside
from node.peers.grpc import GrpcPeers
from protos.invite import Invite
from protos.messages import PeerId
from protos.signing import Identity
from tests.e2e.watched import HaltingTask, Rows, WatchedPeers
from tests.fakes.trainer import ThreadTrainer

if TYPE_CHECKING:
    from tests.e2e.village import Village


LOCAL = "127.0.0.1:0"


@dataclass
class Member:
    """One member's place in the village: its folder and key stay, `task` is the node that runs there now, if any."""

    village: Village
    folder: Path
    identity: Identity
    said: list[str] = field(default_factory=list)
    task: asyncio.Task[str] | None = None
    peers: WatchedPeers | None = None
    trainer: ThreadTrainer | None = None
    halts: dict[str, asyncio.Event] = field(default_factory=dict)
    cut_off_from: set[PeerId] = field(default_factory=set)  # who its rows don't reach
    gate: threading.Event = field(default_factory=threading.Event)
    going: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer

    def start(self, *, rounds: int | None = None, invite: Invite | None = None, **more: Any) -> None:
        """Have it join, or join again with what is in its folder. `more` are further options of `node join`."""
        assert self.task is None or self.task.done()
        self.go_on()
        options = NodeOptions(
            invite=invite or self.village.invite,
            data=self.folder,
            threads=1,
            listen=LOCAL,
            dht=LOCAL,
            rounds=rounds,
            name=self.folder.name,
            **more,
        )
        self.task = asyncio.create_task(join(options, self._outside()), name=f"node {self.folder.name}")
        self.task.add_done_callback(lambda _: self.village.notice())

    async def halted(self, at: str, *others: str) -> None:
        """Have it stand still when it next comes to a place, and wait until it does; at the others, too, unawaited.

        Places are `training`, `rows` and `receipt`, the first `state`, `result` or `piece` that it fetches, and
        `before` and `after` it says something to the leader, such as `before vote`.
        """
        self.halts |= {place: asyncio.Event() for place in (at, *others)}
        reached = self.halts[at]
        await self.village.until(reached.is_set, f"{self.folder.name} to halt at {at}")

    def go_on(self) -> None:
        self.halts = {}
        self.gate.set()
        self.gate = threading.Event()
        self.going, going = asyncio.Event(), self.going
        going.set()

    async def stand_if(self, at: str) -> None:
        if at in self.halts:
            self.halts[at].set()
            self.village.notice()
            await self.going.wait()

    async def kill(self) -> None:
        """As `kill -9` does: its connections break, nothing is said, nothing is written any more."""
        task = self.task
        assert task is not None
        self.gate.set()  # a thread can't be killed
        if self.peers is not None:
            await self.peers.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def leave(self) -> str:
        """Ask it to leave, as `node leave` does; its last words."""
        assert self.task is not None
        await ask(self.folder, "leave")
        return await self.task

    async def status(self) -> dict[str, Any]:
        return await ask(self.folder, "status")

    @property
    def n_lines(self) -> int:
        """Lines to the leader that it has opened."""
        return len(self.peers.lines) if self.peers else 0

    def break_line(self) -> None:
        """As a network does."""
        assert self.peers is not None
        self.peers.lines[-1].break_off()

    @property
    def rows(self) -> dict[PeerId, Rows]:
        return self.peers.rows if self.peers else {}

    @property
    def theta_D(self) -> NDArray[np.float32]:
        """The parameters that it holds, on disk."""
        return np.fromfile(self.state_folder / "theta.bin", "<f4")

    @property
    def state_folder(self) -> Path:
        return self.folder / "state" / (self.folder / "state" / "CURRENT").read_text().strip()

    def _outside(self) -> Outside:
        return Outside(
            make_trainer=lambda _: self._new_trainer(),
            start_dht=self.village.start_records,
            make_peers=self._new_peers,
            say=self._heard,
            owns_process=False,
        )

    def _heard(self, text: str) -> None:
        self.said.append(text)
        self.village.notice()

    def _new_trainer(self) -> ThreadTrainer:
        self.trainer = ThreadTrainer(lambda spec: HaltingTask.within(self, spec))
        return self.trainer

    def _new_peers(self, credentials: Any, **options: Any) -> WatchedPeers:
        self.peers = WatchedPeers(GrpcPeers(credentials, **options), self)
        return self.peers
