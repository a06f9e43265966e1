"""Where pieces of the training data are to be had: other nodes, the likeliest first, and the coordinator over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import chain
from typing import Protocol

import aiohttp

from node.peers.pacing import UNLIMITED, Direction, StreamPace
from node.peers.transport import Progress
from node.ports import PeerFailed, Peers, Traffic
from node.spreading import COPIES, likeliest
from protos.messages import PeerId

AVOIDED_S = 60.0
"""So long who could not be reached is asked after all others, and for what can wait not at all."""
LACKS_KEPT = 2**16
PEERS_AT_ONCE = 4
LIKELIEST = 2 * COPIES
"""So many are asked for a piece because they have it likeliest. All others are asked in one order for all pieces: what
nobody has costs each of them a call or a few then, and not one for every piece."""
HTTP_AT_ONCE = 4
HTTP_CONNECT_S = 5.0
SAID_MOST = 8

Donors = Sequence[tuple[PeerId, Sequence[str]]]
Sink = Callable[[bytes, bytes], Awaitable[None]]


class Source(Protocol):
    """Somewhere pieces can be had."""

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
        """Give what is there of these hashes to the sink. Raises PeerFailed or what the sink raises.

        What is not urgent is not worth another try where the last one failed a moment ago.
        """


class PeerSource:
    """Other nodes, several at once, each piece from one after the other.

    The observer is asked first for what is urgent, and for what can wait after those who lay a piece in before all
    others. Who fails is asked last for a while; who lacks a piece is not asked for it again when it can wait.

    Args:
        donors: gives whom to ask now, with addresses.
        observer: who holds everything, as far as it can be reached.
        seconds: a clock.
    """

    def __init__(
        self,
        peers: Peers,
        donors: Callable[[], Awaitable[Donors]],
        observer: Callable[[], PeerId],
        seconds: Callable[[], float],
    ) -> None:
        self._peers, self._donors, self._observer, self._seconds = peers, donors, observer, seconds
        self._failed: dict[PeerId, float] = {}  # when
        self._lacks: dict[tuple[PeerId, bytes], float] = {}
        self._turns = asyncio.Semaphore(PEERS_AT_ONCE)

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
        donors = dict(await self._donors())
        lines = await self._lines(list(dict.fromkeys(hashes)), list(donors), urgent)
        left = dict.fromkeys(lines)
        said: list[str] = []
        turns: dict[PeerId, list[bytes]] = {}  # what those will be asked for who are not asked yet

        async def take(hash_: bytes, data: bytes) -> None:
            await sink(hash_, data)
            left.pop(hash_, None)

        async def ask_one(peer: PeerId) -> None:
            asked: list[bytes] = []
            try:
                async with self._turns:
                    asked = turns.pop(peer)
                    missing = await self._peers.fetch(
                        peer, donors[peer], "piece", asked, max_bytes, take, exchange=False
                    )
            except PeerFailed as error:
                self._failed[peer] = self._seconds()
                said.append(str(error))
            else:
                self._failed.pop(peer, None)
                self._lacks.update(dict.fromkeys(((peer, hash_) for hash_ in missing), self._seconds()))
            ask([hash_ for hash_ in asked if hash_ in left])

        def ask(hashes: Sequence[bytes]) -> None:
            for hash_ in hashes:
                if (peer := next(lines[hash_], None)) is None:
                    continue
                if peer not in turns:
                    turns[peer] = []
                    group.create_task(ask_one(peer))
                turns[peer].append(hash_)

        try:
            async with asyncio.TaskGroup() as group:
                ask(list(left))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        if left:
            raise PeerFailed("other nodes", _shortened(said) or f"{len(left)} pieces are nowhere")

    async def _lines(self, hashes: list[bytes], donors: list[PeerId], urgent: bool) -> dict[bytes, Iterator[PeerId]]:
        """Per piece whom to ask, in order; who fails meanwhile is asked later, or not."""
        now_s, observer = self._seconds(), self._observer()
        self._failed = {peer: at_s for peer, at_s in self._failed.items() if now_s - at_s < AVOIDED_S}
        if len(self._lacks) > LACKS_KEPT:
            self._lacks.clear()
        members = [peer for peer in donors if peer != observer]
        whole = [observer] if observer in donors else []

        likely = await asyncio.to_thread(likeliest, hashes, members)  # thousands of pieces times hundreds of members
        others = likely[0] if likely else []

        def line(hash_: bytes, its: list[PeerId]) -> Iterator[PeerId]:
            n_before = 0 if urgent else COPIES
            order = chain(its[:n_before], whole, its[n_before:], (peer for peer in others if peer not in its))
            later: list[PeerId] = []
            for peer in order:
                if peer in self._failed:
                    later.append(peer)
                elif urgent or not self._lacking(peer, hash_, now_s):
                    yield peer
            if urgent:
                yield from later

        return {hash_: line(hash_, its[:LIKELIEST]) for hash_, its in zip(hashes, likely, strict=True)}

    def _lacking(self, peer: PeerId, hash_: bytes, now_s: float) -> bool:
        return now_s - self._lacks.get((peer, hash_), -AVOIDED_S) < AVOIDED_S


class HttpSource:
    """The coordinator's `GET /v1/data/HASH`, at each HOST:PORT in turn.

    Args:
        no_progress_s: who sends nothing for so long, or trickles, is given up.
        down: how fast bytes may come in, with those of this node's other connections.
        traffic: where they are counted.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        seconds: Callable[[], float],
        *,
        no_progress_s: float,
        down: Direction = UNLIMITED,
        traffic: Traffic | None = None,
    ) -> None:
        self._hosts, self._seconds, self._down = tuple(hosts), seconds, down
        self._traffic = traffic if traffic is not None else Traffic()
        self._failed: dict[str, float] = {}  # when
        self._no_progress_s = no_progress_s
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=HTTP_CONNECT_S, sock_read=no_progress_s)

    async def fetch(self, hashes: Sequence[bytes], max_bytes: int, sink: Sink, *, urgent: bool = True) -> None:
        said: list[str] = []
        left = dict.fromkeys(hashes)
        async with aiohttp.ClientSession(timeout=self._timeout, auto_decompress=False) as session:
            for host in self._hosts:
                if not urgent and self._seconds() - self._failed.get(host, -AVOIDED_S) < AVOIDED_S:
                    continue
                try:
                    await self._from(session, host, left, max_bytes, sink)
                    return
                except PeerFailed as error:
                    self._failed[host] = self._seconds()
                    said.append(str(error))
        raise PeerFailed("the coordinator", _shortened(said) or "no address is known, or none that answers")

    async def _from(
        self, session: aiohttp.ClientSession, host: str, left: dict[bytes, None], max_bytes: int, sink: Sink
    ) -> None:
        waiting, pace = iter(list(left)), self._down.stream()

        async def work() -> None:
            for hash_ in waiting:
                data = await self._get(session, host, hash_, max_bytes, pace)
                await sink(hash_, data)
                left.pop(hash_, None)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(HTTP_AT_ONCE, len(left))):
                    group.create_task(work())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _get(
        self, session: aiohttp.ClientSession, host: str, hash_: bytes, max_bytes: int, pace: StreamPace
    ) -> bytes:
        progress = Progress(self._no_progress_s)
        url = f"http://{host}/v1/data/{hash_.hex()}"
        try:
            async with progress, session.get(url, allow_redirects=False) as response:
                if response.status != 200:
                    raise PeerFailed(host, f"answered {response.status} to a piece of data")
                data = bytearray()
                async for part in response.content.iter_any():
                    data += part
                    progress.came(len(part))
                    self._traffic.received += len(part)
                    if len(data) > max_bytes:
                        raise PeerFailed(host, f"sent more than the {max_bytes} bytes that are possible")
                    with progress.ours():
                        await pace.wait(len(part))
                return bytes(data)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise PeerFailed(host, progress.why or str(error) or "no answer in time") from error


def _shortened(said: Sequence[str]) -> str:
    """What was said, but not by thousands of peers."""
    more = f"; and {len(said) - SAID_MOST} more" if len(said) > SAID_MOST else ""
    return "; ".join(said[:SAID_MOST]) + more
