"""How many streams one peer may have open with a leader, and how often it may say hello: each costs all others."""

from __future__ import annotations

from collections import OrderedDict

from coordinator.leading.lines import Allowance, MemberLine
from coordinator.rounds.events import Instant
from protos import limits
from protos.messages import PeerId

STREAMS_MOST = 3
"""Of one peer: its line, one that died without a word, and the one that it opens now."""
HELLOS_PER_S = 0.5
HELLOS_BURST = 20.0
"""Of one peer: each is answered with the whole ledger and everybody's record."""
PEERS_KEPT = limits.MEMBERS
REPLACED = f"newer streams of this peer were opened, and it may have {STREAMS_MOST}"


class Streams:
    """The open streams of each peer, the oldest first. The newest is always taken: a node that was killed comes back
    while its old streams still look alive, and an older one ends for it."""

    def __init__(self) -> None:
        self._of: dict[PeerId, list[MemberLine]] = {}
        self._silent: set[MemberLine] = set()  # those that have not said hello
        self._hellos: OrderedDict[PeerId, Allowance] = OrderedDict()

    def opened(self, line: MemberLine) -> None:
        """Where its peer has too many, one ends: one that has said nothing yet, before one that is a line."""
        lines = self._of.setdefault(line.peer, [])
        if len(lines) >= STREAMS_MOST:
            oldest = next((each for each in lines if each in self._silent), lines[0])
            lines.remove(oldest)
            self._silent.discard(oldest)
            oldest.drop(REPLACED)
        lines.append(line)
        self._silent.add(line)

    def greeted(self, line: MemberLine) -> None:
        """It has said hello."""
        self._silent.discard(line)

    def ended(self, line: MemberLine) -> None:
        self._silent.discard(line)
        lines = self._of.get(line.peer, [])
        if line in lines:
            lines.remove(line)
        if not lines:
            self._of.pop(line.peer, None)

    def may_greet(self, peer: PeerId, now: Instant) -> bool:
        """Whether a peer may say hello once more now."""
        allowance = self._hellos.pop(peer, None) or Allowance(HELLOS_PER_S, HELLOS_BURST, now)
        self._hellos[peer] = allowance
        if len(self._hellos) > PEERS_KEPT:
            self._hellos.popitem(last=False)
        return allowance.take(1.0, now)
