"""Who is left out after an exchange failed, by what its reducers say has not come: a sender, or the reducer itself."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping

from protos.messages import PeerId

TWO = 2
"""One word against another is no more than that, however few may lie."""


def least_words(f: int, n_others: int) -> int:
    """So many reducers must have lacked a sender's rows before it is put out: one of f + 1 is honest.

    Where no more than `n_others` could say so, that all of them do is enough; else who can't send to anybody would keep
    every chunk from being reduced.
    """
    return max(TWO, min(f + 1, n_others))


def blame(claims: Mapping[PeerId, Collection[PeerId]], suspects: Collection[PeerId]) -> tuple[set[PeerId], set[PeerId]]:
    """(senders, reducers) that are at fault, so that every claim is explained.

    `claims` are reducers' words on which senders' rows have not come, `suspects` the senders that enough of them name.
    A claim is not a proof: one reducer that names many senders is more likely at fault itself than all of them, and a
    sender that several reducers name is. Greedily the side that explains most of the claims left is taken: a suspect
    if it explains more than any reducer does, else a reducer; of several that explain as many the one of the lowest id.

    Counts only fall, so the count that stands in a heap is looked at again when it comes to the top: with C claims this
    takes about C·log C.
    """
    senders_of = {reducer: set(senders) for reducer, senders in claims.items() if senders}
    reducers_of: dict[PeerId, set[PeerId]] = {}
    for reducer, senders in senders_of.items():
        for sender in senders:
            reducers_of.setdefault(sender, set()).add(reducer)
    by_reducer = [(-len(senders), reducer) for reducer, senders in senders_of.items()]
    by_sender = [(-len(reducers_of[sender]), sender) for sender in reducers_of if sender in suspects]
    heapq.heapify(by_reducer)
    heapq.heapify(by_sender)
    senders_out: set[PeerId] = set()
    reducers_out: set[PeerId] = set()
    while (most := _most(by_reducer, senders_of)) is not None:
        n_claims, reducer = most
        suspect = _most(by_sender, reducers_of)
        if suspect is not None and suspect[0] > n_claims:
            senders_out.add(suspect[1])
            _settle(suspect[1], reducers_of, senders_of)
        else:
            reducers_out.add(reducer)
            _settle(reducer, senders_of, reducers_of)
    return senders_out, reducers_out


def _most(heap: list[tuple[int, PeerId]], open_: Mapping[PeerId, set[PeerId]]) -> tuple[int, PeerId] | None:
    """Who has the most open claims, and how many; None where nobody has any."""
    while heap:
        said, peer = heap[0]
        n = len(open_[peer])
        if not n:
            heapq.heappop(heap)
        elif n != -said:
            heapq.heapreplace(heap, (-n, peer))
        else:
            return n, peer
    return None


def _settle(peer: PeerId, here: dict[PeerId, set[PeerId]], there: dict[PeerId, set[PeerId]]) -> None:
    """Its claims are explained."""
    for other in here[peer]:
        there[other].discard(peer)
    here[peer].clear()
