"""Where members can be asked: all who are here, and as many of those who have left as a run has members."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from protos import limits
from protos.messages import PeerId


class Addresses:
    """Whoever left is remembered, so that it can be asked for commits; who left first is forgotten first.

    Args:
        n_most: so many of those who have left are kept.
    """

    def __init__(self, n_most: int = limits.MEMBERS) -> None:
        self._n_most = n_most
        self._here: dict[PeerId, tuple[str, ...]] = {}
        self._left: OrderedDict[PeerId, tuple[str, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._here) + len(self._left)

    def of(self, peer: PeerId) -> tuple[str, ...]:
        """Its newest addresses; none if it has none, or is not remembered."""
        return self._here.get(peer) or self._left.get(peer, ())

    def here(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Its line is open, and these are the addresses that its record names."""
        self._left.pop(peer, None)
        self._here[peer] = addresses

    def gone(self, peer: PeerId, keep: Container[PeerId]) -> None:
        """Its line has ended. Those to keep are not forgotten, however long ago they left: they are few."""
        if not (addresses := self._here.pop(peer, ())):
            return
        self._left[peer] = addresses
        if len(self._left) > self._n_most:
            oldest = next((left for left in self._left if left not in keep), None)
            if oldest is not None:
                del self._left[oldest]
