"""What a redeal means: who reduces each chunk after it, and what the leader may say in one."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from aggregation.exchange import reducers_of
from protos.messages import PeerId, Plan, PlanMember, Redeal

REDEALS_MOST = 16
"""Redeals of an attempt: what goes wrong more often than that needs another one."""
SHRINKS_MOST = 3
"""How often the included set of an attempt may shrink."""

Lines = tuple[tuple[PeerId, ...], ...]
"""Per chunk the reducers in line, or those that reduce it."""


def enough(plan: Plan) -> int:
    """So many replicas of a chunk that say the same need no more to say it: one of them is honest."""
    return min(plan.f + 1, plan.replicas)


def n_sharing(members: Iterable[PlanMember]) -> int:
    """How many of a plan's reducers have a share of the chunks: those in reserve only if they are all there is."""
    reducers = [member for member in members if member.reducer]
    return sum(1 for member in reducers if not member.reserve) or len(reducers)


def reducers_now(plan: Plan, lines: Lines, redeal: Redeal | None) -> Lines:
    """Who reduces each chunk, after the last redeal."""
    if redeal is None:
        return reducers_after(plan, lines, (), ())
    return reducers_after(plan, lines, redeal.lost, [(item.chunk, item.reducer) for item in redeal.moved])


def reducers_after(plan: Plan, lines: Lines, lost: Collection[PeerId], moved: Collection[tuple[int, PeerId]]) -> Lines:
    """Who reduces each chunk without those that are lost and the chunks that are moved away; see `reducers_of`."""
    dealt = reducers_of(lines, plan.replicas, enough(plan), frozenset(lost), frozenset(moved))
    return tuple(tuple(PeerId(peer) for peer in peers) for peers in dealt)


def chunks_of(reducers: Lines) -> dict[PeerId, list[int]]:
    """The chunks that each reducer has been dealt, in order."""
    dealt: dict[PeerId, list[int]] = {}
    for chunk, peers in enumerate(reducers):
        for peer in peers:
            dealt.setdefault(peer, []).append(chunk)
    return dealt


def redeal_faults(redeal: Redeal, plan_hash: bytes, plan: Plan, senders: Collection[PeerId], lines: Lines) -> list[str]:
    """What is wrong with a redeal by itself, after a deal that includes these senders and gives these lines."""
    reducers = {peer for line in lines[:1] for peer in line}
    excluded = [entry.peer for entry in redeal.excluded]
    moved = [(item.chunk, item.reducer) for item in redeal.moved]
    faults: list[str] = []
    if redeal.plan != plan_hash:
        faults.append("the redeal is of another plan")
    if not 1 <= redeal.number <= REDEALS_MOST:
        faults.append(f"{redeal.number} is no redeal's number")
    if excluded != sorted(set(excluded)) or not set(excluded) < set(senders):
        faults.append("those that the redeal excludes are not included senders, in order, with some left")
    if not all(entry.reason for entry in redeal.excluded):
        faults.append("the redeal excludes somebody without a reason")
    if list(redeal.lost) != sorted(set(redeal.lost)) or not set(redeal.lost) <= reducers:
        faults.append("those that the redeal calls lost are not the deal's reducers, in order")
    if moved != sorted(set(moved)) or not all(chunk < len(lines) and peer in reducers for chunk, peer in moved):
        faults.append("the chunks that the redeal moves are not the deal's, in order")
    if (redeal.set_number == 0) != (not excluded) or redeal.set_number > redeal.number:
        faults.append("the redeal's set has a number that it can't have")
    if not faults and not all(reducers_now(plan, lines, redeal)):
        faults.append("the redeal leaves a chunk without a reducer")
    return faults


def follows(later: Redeal, earlier: Redeal) -> bool:
    """Whether a redeal keeps all that an earlier one of the attempt said: it only adds."""
    shrank = later.excluded != earlier.excluded
    return (
        later.number > earlier.number
        and set(earlier.excluded) <= set(later.excluded)
        and set(earlier.lost) <= set(later.lost)
        and set(earlier.moved) <= set(later.moved)
        and (earlier.number < later.set_number if shrank else later.set_number == earlier.set_number)
    )
