"""Lays in training data beyond the leases, a little at a time, so that the operator's absence stops nobody."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.rounds.ledger import Ledger
from node.blocks import GAVE_WAY, PieceStore
from node.errors import NodeError
from node.spreading import places_of, stock_order
from protos.messages import PeerId
from protos.runspec import RunSpec

DISK_SHARE = 0.25
"""Data take at most so much of what the disk would have free without them: on a disk that fills up they make room."""
LOOK_S = 0.25
IDLE_S = 15.0
PLAN_S = 10.0
"""What is needed next moves on with each commit; so often is often enough to look."""
PLAN_SHARE = 0.01
"""Of millions of pieces and many members a plan takes seconds: it is made less often then."""
AIM_S = 0.5
GIVEN_UP_MOST = 1024
"""So many pieces give way at a time at most: a lease waits for that."""
PIECES_MOST = 16
"""So many pieces come at a time at most, fewer where they take longer than `AIM_S`."""
BACK_OFF_FIRST_S = 1.0
BACK_OFF_MAX_S = 60.0
NOT_HAD_S = 120.0
"""So long a piece that nobody gave is passed over."""


class Stocker:
    """Fetches in a node's idle time, at most half of that, what others may need and what it will be leased itself.

    Args:
        ledger: the books after the held state: where the run is in its data, and who is in it.
        reachable: who others can connect to, without the observer.
        quiet: whether the line is free for what can wait: no exchange, nothing of the state to fetch, not paused.
        cache_bytes: how much of the data may lie here; leased pieces go beyond it where they must.
        free_bytes: how much room the disk has left.
    """

    def __init__(
        self,
        me: PeerId,
        pieces: PieceStore,
        *,
        spec: Callable[[], RunSpec],
        ledger: Callable[[], Ledger | None],
        reachable: Callable[[], Iterable[PeerId]],
        quiet: Callable[[], bool],
        cache_bytes: int,
        free_bytes: Callable[[], int] | None = None,
        seconds: Callable[[], float],
        say: Callable[[str], None],
    ) -> None:
        self._me, self._pieces, self._files = me, pieces, pieces.files
        self._spec, self._ledger, self._reachable, self._quiet = spec, ledger, reachable, quiet
        self._cache_bytes, self._seconds, self._say = cache_bytes, seconds, say
        self._free_bytes = free_bytes or (lambda: shutil.disk_usage(pieces.files.folder).free)
        shards = self._files.shards
        self._sizes_P = np.full(shards.n_train_pieces, shards.place(0).n_bytes, np.int64)
        self._sizes_P[-1] = shards.place(shards.n_train_pieces - 1).n_bytes
        self._places_P: NDArray[np.uint64] | None = None
        self._order_P: NDArray[np.int64] | None = None
        self._planned_for: tuple[object, ...] = ()
        self._planned_at = 0.0
        self._plan_took_s = 0.0
        self._all_seen = False
        self._n_at_once = 1
        self._back_off_s = BACK_OFF_FIRST_S
        self._not_had: dict[int, float] = {}  # until when
        self._limit_bytes = cache_bytes
        self._problem = ""

    async def run(self, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Until cancelled."""
        while True:
            await sleep(await self.turn())

    async def turn(self) -> float:
        """Do the next little thing, if now is a time for it. How long to rest then."""
        if self._pieces.busy or not self._quiet():
            return LOOK_S
        began_s = self._seconds()
        try:
            rest_s = await self._work()
            problem = ""
        except (NodeError, OSError) as error:  # no room, say
            rest_s, problem = BACK_OFF_MAX_S, str(error)
        if problem and problem != self._problem:
            self._say(f"no training data are laid in: {problem}")
        self._problem = problem
        return rest_s if rest_s is not None else self._seconds() - began_s

    def status(self) -> dict[str, Any]:
        """For `node status`."""
        have_P = self._files.have_P()
        return {
            "pieces": len(have_P),
            "pieces_here": int(have_P.sum()),
            "bytes_here": int(self._sizes_P[have_P].sum()),
            "cache_bytes": self._limit_bytes,
            "damaged": self._pieces.n_damaged,
            "problem": self._problem or None,
        }

    # -- one turn --------------------------------------------------------------------------------------------------

    async def _work(self) -> float | None:
        """How long to rest; None: as long as this took."""
        if not self._all_seen and (unseen := self._files.unseen(PIECES_MOST)):
            n_before = self._pieces.n_damaged
            await self._pieces.look_at(unseen)
            if n := self._pieces.n_damaged - n_before:
                self._say(f"{n} pieces of the training data on this disk are damaged: they are fetched again")
            return None
        self._all_seen = True  # what comes from now on is verified before it is noted
        if not self._files.hashes:
            return self._after(await self._pieces.lay_in(()))
        order_P = await self._plan()
        if order_P is None:
            return LOOK_S
        wanted, n_given_up = await self._next(order_P)
        if not wanted:
            return None if n_given_up == GIVEN_UP_MOST else IDLE_S
        return await self._lay_in(wanted)

    async def _plan(self) -> NDArray[np.int64] | None:
        """All pieces in the order in which they are laid in, kept until what it comes from is another."""
        ledger = self._ledger()
        if ledger is None:
            return None
        seated = {seat.peer for seat in ledger.seats}
        reachable = [peer for peer in self._reachable() if peer != self._me]
        others = tuple(peer for peer in reachable if peer in seated or not seated)  # nobody is before the first round
        made_for = (ledger.cursor, others)
        now_s = self._seconds()
        pause_s = max(PLAN_S, self._plan_took_s / PLAN_SHARE)
        due = made_for != self._planned_for and now_s - self._planned_at >= pause_s
        if self._order_P is None or due:
            self._order_P = await asyncio.to_thread(self._ordered, self._spec(), ledger.cursor, others)
            self._planned_for, self._planned_at = made_for, now_s
            self._plan_took_s = self._seconds() - now_s
        return self._order_P

    def _ordered(self, spec: RunSpec, cursor: int, others: Sequence[PeerId]) -> NDArray[np.int64]:
        if self._places_P is None:
            self._places_P = places_of(self._files.hashes[: len(self._sizes_P)])
        return stock_order(spec, cursor, self._places_P, self._me, others)

    async def _next(self, order_P: NDArray[np.int64]) -> tuple[list[int], int]:
        """What to lay in now; where the room is used up, what is needed last gives way: how many did."""
        now_s = self._seconds()
        self._not_had = {piece: until_s for piece, until_s in self._not_had.items() if until_s > now_s}
        have_P, leased, not_had = self._files.have_P(), self._pieces.leased, frozenset(self._not_had)
        wanted, given_up, enough = await asyncio.to_thread(self._choose, order_P, have_P, leased, not_had)
        n_given_up = await self._pieces.drop(given_up) if given_up else 0
        return wanted if enough and n_given_up == len(given_up) else [], n_given_up

    def _choose(
        self, order_P: NDArray[np.int64], have_P: NDArray[np.bool_], leased: frozenset[int], not_had: frozenset[int]
    ) -> tuple[list[int], list[int], bool]:
        """What to lay in, what to give up for it or for a disk that fills up, and whether that makes room enough."""
        held_bytes = int(self._sizes_P[have_P].sum())
        self._limit_bytes = min(self._cache_bytes, int(DISK_SHARE * (held_bytes + self._free_bytes())))
        # Leases have their room before all; the rest is for the first pieces in the order.
        leased_P = np.zeros(len(have_P), np.bool_)
        leased_P[[piece for piece in leased if piece < len(have_P)]] = True
        others_P = order_P[~leased_P[order_P]]
        room_bytes = self._limit_bytes - int(self._sizes_P[leased_P].sum())
        n_fit = int(np.searchsorted(np.cumsum(self._sizes_P[others_P]), room_bytes, "right"))
        fit_P, beyond_P = others_P[:n_fit], others_P[n_fit:]
        missing = fit_P[~have_P[fit_P]][: self._n_at_once + len(not_had)].tolist()
        wanted = [piece for piece in missing if piece not in not_had][: self._n_at_once]
        excess_bytes = held_bytes + int(self._sizes_P[wanted].sum()) - self._limit_bytes
        given_up: list[int] = []
        for piece in beyond_P[have_P[beyond_P]][: -GIVEN_UP_MOST - 1 : -1].tolist() if excess_bytes > 0 else ():
            if excess_bytes <= 0:
                break
            given_up.append(piece)
            excess_bytes -= int(self._sizes_P[piece])
        return wanted, given_up, excess_bytes <= 0

    async def _lay_in(self, wanted: list[int]) -> float | None:
        began_s = self._seconds()
        why = await self._pieces.lay_in(wanted)
        if why == GAVE_WAY:
            return LOOK_S
        came = [piece for piece in wanted if self._files.have(piece)]
        if not came:
            return self._after(why, wanted)
        took_s = self._seconds() - began_s
        if took_s < AIM_S / 2:
            self._n_at_once = min(2 * self._n_at_once, PIECES_MOST)
        elif took_s > 2 * AIM_S:
            self._n_at_once = max(1, self._n_at_once // 2)
        missing = [piece for piece in wanted if not self._files.have(piece)]
        self._after("", missing)
        return None

    def _after(self, why: str, missing: Iterable[int] = ()) -> float | None:
        """What to do after a try: these pieces are passed over for a while, and others come later and later."""
        for piece in missing:
            self._not_had[piece] = self._seconds() + NOT_HAD_S
        if not why:
            self._back_off_s = BACK_OFF_FIRST_S
            return None
        rest_s, self._back_off_s = self._back_off_s, min(2 * self._back_off_s, BACK_OFF_MAX_S)
        return rest_s
