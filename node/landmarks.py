"""Where the coordinator and its observer are: as admission told, and asked again, for both may move."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress

from node.errors import NodeError
from node.ports import PeerFailed
from node.whereabouts import Whereabouts
from protos.messages import Addresses, PeerId

FOUND_AT_ONCE = 16
"""So many members are looked for in the DHT at a time."""


class Landmarks:
    """What a node finds the others by when nobody else has told it anything.

    Args:
        me: this node, who is not asked.
        coordinator: its peer id.
        addresses: what admission told.
        ask: asks the coordinator anew; raises NodeError if it is away.
        whereabouts: is told of the observer.
    """

    def __init__(
        self,
        me: PeerId,
        coordinator: PeerId,
        addresses: Addresses,
        ask: Callable[[], Awaitable[Addresses]],
        whereabouts: Whereabouts,
    ) -> None:
        self._me, self._coordinator, self._addresses = me, coordinator, addresses
        self._ask, self._whereabouts = ask, whereabouts
        self._n_lines = 0
        self._know()

    async def look(self) -> Addresses:
        """Ask anew; what was known if nobody answers."""
        with suppress(NodeError):
            self._addresses = await self._ask()
            self._know()
        return self._addresses

    async def leader(self) -> tuple[PeerId, tuple[str, ...]]:
        """Whom to open the line to. The coordinator may have moved while a line was open, so later ones ask first."""
        self._n_lines += 1
        addresses = self._addresses if self._n_lines == 1 else await self.look()
        return self._coordinator, addresses.grpc

    @property
    def observer(self) -> PeerId:
        """As last told; empty if nobody has."""
        return self._addresses.observer

    def donors(self) -> list[tuple[PeerId, Sequence[str]]]:
        """Whom to ask for what is the run's, with addresses: the observer first, then all that can be reached."""
        records = [record for record in self._whereabouts.reachable() if record.peer != self._me]
        records.sort(key=lambda record: record.peer != self._addresses.observer)
        return [(record.peer, record.grpc) for record in records]

    async def find_donors(self, members: Iterable[PeerId]) -> list[tuple[PeerId, Sequence[str]]]:
        """The donors; where none is known, the coordinator is asked for the observer, and the DHT for these members."""
        if not self.donors():
            await self.look()
        if not self.donors():
            await asyncio.gather(*(self._find(peer) for peer in list(members)[:FOUND_AT_ONCE] if peer != self._me))
        return self.donors()

    async def _find(self, peer: PeerId) -> None:
        with suppress(PeerFailed):
            await self._whereabouts.addresses(peer)

    def _know(self) -> None:
        if self._addresses.observer and self._addresses.observer_grpc:
            self._whereabouts.know(self._addresses.observer, self._addresses.observer_grpc)
