"""What the web pages show and take, from the parts of a serving coordinator."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

from coordinator.admission import Admission, BadRequest, Refusal
from coordinator.bulletin import Bulletin, Follower
from coordinator.folder import Founded
from coordinator.journal import Journal
from coordinator.leading.driver import Driver
from coordinator.leading.ports import Clock
from coordinator.web.metrics import Metrics
from coordinator.web.pieces import Pieces
from coordinator.web.site import AdmitMalformed, AdmitRefused
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
        self._of: tuple[PeerId | None, bytes] | None = None
        self._envelope = b""

    def envelope(self, observer: PeerId | None, record: bytes | None) -> bytes:
        """Signed anew when the observer's record has changed. The sequence grows with the run's clock."""
        key = (observer, record or b"")
        if key != self._of:
            opened: Record | None = None
            if observer is not None and record is not None:
                opened = open_record(record, run=self._founded.run, peer=observer)
            addresses = Addresses(
                sequence=int(self._clock.run_time_s() * 1000),
                grpc=self._grpc,
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
        journal: Journal,
        writer: Writer,
        clock: Clock,
        pieces: Pieces,
        whereabouts: Whereabouts,
        secret: str,
    ) -> None:
        self._founded = founded
        self._driver = driver
        self._bulletin = bulletin
        self._admission = admission
        self._journal = journal
        self._writer = writer
        self._clock = clock
        self._pieces = pieces
        self._whereabouts = whereabouts
        self._secret = secret
        self._metrics = Metrics(founded.run)

    def run_info(self) -> bytes:
        observer = self._admission.observer
        record = self._driver.record_of(observer) if observer else None
        return encode(
            RunInfo(
                spec=self._founded.spec_envelope,
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
        return self._bulletin.status(self._driver)

    async def rows(self, after_round: int, limit: int) -> list[dict[str, Any]]:
        return await self._bulletin.rows(after_round, limit)

    def follow(self) -> Follower | None:
        return self._bulletin.follow()

    def unfollow(self, follower: AnyFollower) -> None:
        if isinstance(follower, Follower):
            self._bulletin.unfollow(follower)

    async def operate(self, word: str) -> None:
        if word not in ("pause", "resume"):
            raise KeyError(word)
        run_time_s = self._clock.run_time_s()
        await self._writer.run(lambda: self._journal.order(word, {}, run_time_s))
        self._driver.pause(word == "pause")
        self._bulletin.said("the operator has paused the run" if word == "pause" else "the operator resumes the run")

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
