"""What a leader has done beside its task: members are dialled, and asked for commits; so many at once, and no more.

Whoever has a seat or a vote has places of its own: identities cost a stranger little, and a thousand of them with
addresses where nobody answers, or with tales of commits that they have, must not keep the others waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from coordinator.leading.learning import Learner, Unknown
from coordinator.leading.ports import Clock, Prober
from coordinator.rounds.events import Branched, Event, Instant, Learned, Reached, Sought
from coordinator.rounds.ledger import Ledger
from protos.messages import PeerId

PROBES_AT_ONCE = 16
"""Of those who have a seat or a vote; of strangers at their first try; and of strangers who need more than that."""
FIRST_TRY_S = 3.0
"""A stranger that doesn't answer within so long lets the next one in, and is dialled again at leisure."""
LEARNS_AT_ONCE = 2
"""Of those who have a seat or a vote, and of strangers: each may send `learning.BRANCH_BYTES_MOST`."""
SEEKS_AT_ONCE = 16
"""Of all that are asked before an epoch is opened."""
LEARN_S = 300.0
"""So long one member is listened to for the commits that it has: it may let them trickle."""
GIVE_WAY_S = 30.0
"""A stranger that has been listened to for so long gives way to another one that names commits."""


class Errands:
    """Started by the driver, and their outcomes come back as events.

    Args:
        learner: asks members for commits that this leader lacks; None: nobody is asked.
        post: takes the outcomes.
        books: the ledger at the head, now.
        addresses: where a peer can be asked.
        is_known: whether a peer has a seat or a vote.
    """

    def __init__(
        self,
        prober: Prober,
        learner: Learner | None,
        clock: Clock,
        *,
        post: Callable[[Event], None],
        books: Callable[[], Ledger],
        addresses: Callable[[PeerId], tuple[str, ...]],
        is_known: Callable[[PeerId], bool],
    ) -> None:
        self._prober, self._learner, self._clock = prober, learner, clock
        self._post, self._books, self._addresses, self._is_known = post, books, addresses, is_known
        self._probing: dict[PeerId, asyncio.Task[None]] = {}
        self._known, self._first, self._later = (asyncio.Semaphore(PROBES_AT_ONCE) for _ in range(3))
        self._learning: dict[PeerId, tuple[Instant, asyncio.Task[None]]] = {}
        self._seeking: asyncio.Task[None] | None = None
        self._seeks = asyncio.Semaphore(SEEKS_AT_ONCE)

    async def end(self) -> None:
        """Nothing comes of those that are under way."""
        tasks = [*self._probing.values(), *(task for _, task in self._learning.values())]
        if self._seeking is not None:
            tasks.append(self._seeking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- probes ----------------------------------------------------------------------------------------------------

    def probe(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Find out whether a member can be connected to; what was found out of older addresses is not said any more."""
        if (running := self._probing.pop(peer, None)) is not None:
            running.cancel()
        task = self._probing[peer] = _started(self._probed(peer, addresses), f"probe {peer[-6:]}")
        task.add_done_callback(lambda done: self._probe_done(peer, done))

    async def _probed(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        self._post(Reached(peer, await self._reaches(peer, addresses)))

    async def _reaches(self, peer: PeerId, addresses: tuple[str, ...]) -> bool:
        if self._is_known(peer):
            async with self._known:
                return await self._prober.reaches(peer, addresses)
        with suppress(TimeoutError):
            async with self._first, asyncio.timeout(FIRST_TRY_S):
                return await self._prober.reaches(peer, addresses)
        async with self._later:
            return await self._prober.reaches(peer, addresses)

    def _probe_done(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        if self._probing.get(peer) is task:
            del self._probing[peer]

    # -- commits that others have ----------------------------------------------------------------------------------

    def learn(self, peer: PeerId) -> None:
        """Ask a member for the commits that it names. Without a place for it nothing happens: it is asked when it says
        so again, and who is asked then is nobody's choice."""
        if self._learner is None or peer in self._learning:
            return
        now, known = self._clock.now(), self._is_known(peer)
        others = [other for other in self._learning if self._is_known(other) == known]
        if len(others) >= LEARNS_AT_ONCE:
            began_at, task = self._learning[others[0]]
            if known or now < began_at + GIVE_WAY_S:
                return
            del self._learning[others[0]]
            task.cancel()
        task = _started(self._learned(peer), "learner")
        self._learning[peer] = now, task
        task.add_done_callback(lambda done: self._learn_done(peer, done))

    def seek(self, peers: Sequence[PeerId]) -> None:
        """Ask them all, in this order, as many at once as may be; `Sought` comes when nobody is left to ask.
        Who seeks anew has waited for the last ones for long enough."""
        if self._seeking is not None:
            self._seeking.cancel()
        self._seeking = _started(self._sought(peers), "seeker")

    async def _learned(self, peer: PeerId) -> None:
        for event in await self._told(peer):
            self._post(event)

    async def _sought(self, peers: Sequence[PeerId]) -> None:
        async def ask(peer: PeerId) -> None:
            async with self._seeks:
                await self._learned(peer)  # said at once: the others may let it wait for longer than anybody does

        await asyncio.gather(*(ask(peer) for peer in peers))
        self._post(Sought())

    async def _told(self, peer: PeerId) -> list[Learned] | list[Branched]:
        """What it has that this leader lacks."""
        addresses = self._addresses(peer)
        if self._learner is None or not addresses:
            return []
        with suppress(Unknown, TimeoutError):
            async with asyncio.timeout(LEARN_S):
                told = await self._learner.learn(peer, addresses, self._books())
            return [told] if isinstance(told, Branched) else told
        return []

    def _learn_done(self, peer: PeerId, task: asyncio.Task[None]) -> None:
        if (running := self._learning.get(peer)) is not None and running[1] is task:
            del self._learning[peer]


def _started(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    return asyncio.get_running_loop().create_task(work, name=name)
