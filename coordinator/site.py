"""What the web pages show and take, from the parts of a serving coordinator."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

from coordinator.admission import Admission, BadRequest, Refusal
from coordinator.bulletin import Bulletin, Follower
from coordinator.folder import Founded
from coordinator.leading.driver import Driver
from coordinator.leading.ports import Clock
from coordinator.orders import Desk, Refused
from coordinator.web.metrics import Metrics
from coordinator.web.pieces import Pieces
from coordinator.web.site import AdmitMalformed, AdmitRefused, OrderRefused
from coordinator.web.site import Follower as AnyFollower
from coordinator.writer import Writer
from protos import limits
from protos.messages import Addresses, PeerId, Record, RunInfo
from protos.records import open_record
from protos.signing import Identity, Purpose, SignatureError, public_key_of, seal
from protos.wire import encode


class Whereabouts:
    """The signed addresses that newcomers are given: the coordinator's, and the observer's while it is there."""

    def __init__(self, founded: Founded, identity: Identity, grpc: tuple[str, ...], clock: Clock) -> None:
        self._founded = founded
        self._identity = identity
        self._grpc = grpc
        self._clock = clock
        self.others: tuple[str, ...] = ()
        """Where the lines of coordinators are that may take over."""
        self._of: tuple[PeerId | None, bytes, tuple[str, ...]] | None = None
        self._envelope = b""

    def envelope(self, observer: PeerId | None, record: bytes | None) -> bytes:
        """Signed anew when the observer's record has changed, or who stands by. The sequence is of the run's clock."""
        key = (observer, record or b"", self.others)
        if key != self._of:
            opened: Record | None = None
            if observer is not None and record is not None:
                opened = open_record(record, run=self._founded.run, peer=observer)
            addresses = Addresses(
                sequence=int(self._clock.run_time_s() * 1000),
                grpc=(*self._grpc, *self.others)[: limits.ADDRESSES],
                dht=opened.dht if opened else (),
                observer=observer if observer and opened else PeerId(""),
                observer_grpc=opened.grpc if opened else (),
            )
            self._envelope = seal(self._identity, Purpose.ADDRESSES, self._founded.run, encode(addresses))
            self._of = key
        return self._envelope


class CoordinatorSite:
    """The web's port on a serving coordinator.

    Args:
        secret: who knows it has read the run's folder, and is the operator.
    """

    def __init__(
        self,
        founded: Founded,
        driver: Driver,
        bulletin: Bulletin,
        admission: Admission,
        writer: Writer,
        clock: Clock,
        pieces: Pieces,
        whereabouts: Whereabouts,
        secret: str,
        desk: Desk,
    ) -> None:
        self._desk = desk
        self._founded = founded
        self._driver = driver
        self._bulletin = bulletin
        self._admission = admission
        self._writer = writer
        self._clock = clock
        self._pieces = pieces
        self._whereabouts = whereabouts
        self._secret = secret
        self._metrics = Metrics(founded.run)

    def run_info(self, revision: int = 0) -> bytes | None:
        spec = self._desk.spec_envelope(revision)
        if spec is None:
            return None
        observer = self._admission.observer
        record = self._driver.record_of(observer) if observer else None
        return encode(
            RunInfo(
                spec=spec,
                operator=self._founded.operator_envelope,
                addresses=self._whereabouts.envelope(observer, record),
                protocol=limits.PROTOCOL,
                run_time_s=self._clock.run_time_s(),
            )
        )

    async def admit(self, raw: bytes) -> bytes:
        run_time_s = self._clock.run_time_s()
        try:
            admitted = await self._writer.run(lambda: self._admission.admit(raw, run_time_s))
        except Refusal as refusal:
            raise AdmitRefused(refusal.code, str(refusal)) from refusal
        except BadRequest as error:
            raise AdmitMalformed(str(error)) from error
        if not admitted.observer:
            name = f" ({admitted.name})" if admitted.name else ""
            self._bulletin.said(f"admitted {admitted.peer[-6:]}{name}")
        return encode(admitted.response)

    async def piece(self, hash_: bytes) -> bytes | None:
        return await asyncio.to_thread(self._pieces.read, hash_)

    def status(self) -> dict[str, Any]:
        return self._bulletin.status(self._driver) | self._desk.status()

    async def rows(self, after_round: int, limit: int) -> list[dict[str, Any]]:
        return await self._bulletin.rows(after_round, limit)

    def follow(self) -> Follower | None:
        return self._bulletin.follow()

    def unfollow(self, follower: AnyFollower) -> None:
        if isinstance(follower, Follower):
            self._bulletin.unfollow(follower)

    async def order(self, envelope: bytes) -> dict[str, Any]:
        try:
            taken = (await self._desk.take(envelope)).order
        except Refused as refused:
            raise OrderRefused(str(refused)) from refused
        reason = f": {taken.reason}" if taken.reason else ""
        self._bulletin.said(f"the operator's order {taken.number}: {taken.kind}{reason}")
        return {"number": taken.number, "kind": taken.kind, "round": self._driver.ledger.round + 1}

    def is_operator(self, secret: str) -> bool:
        return secrets.compare_digest(secret.encode(), self._secret.encode())

    async def digests(self) -> dict[str, dict[str, str]]:
        return await self._bulletin.digests()

    def explain(self, peer: str) -> list[str]:
        return self._driver.explain(PeerId(peer))

    def metrics(self) -> bytes:
        return self._metrics.render(self.status())


def read_allowed(path: Path) -> frozenset[PeerId]:
    """The peer ids of an allow-list, one a line, `#` begins a comment; other lines are passed over."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    peers: set[PeerId] = set()
    for line in lines:
        word = line.partition("#")[0].strip()
        try:
            public_key_of(word)
        except SignatureError:
            continue
        peers.add(PeerId(word))
    return frozenset(peers)
