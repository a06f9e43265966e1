"""The folded ledger: what the chain of commits says so far, all that a decision needs for longer than one round.

Anyone who folds the same bodies has the same ledger, and each body names the hash of the ledger after it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from aggregation.digest import tagged_hash
from aggregation.rules.gate import normalised
from coordinator.rounds import leases
from protos import bounds, limits
from protos.messages import ZERO_HASH, Body, MemberEntry, Outcome, PeerId, Range, Seat, Standing
from protos.orders import Kind, OpenedOrder

NORMS_KEPT = 16
LEDGER_BYTES_MAX = 16 * 2**20


class LedgerError(ValueError):
    """A body that doesn't extend this ledger, or bytes that are no ledger: says what doesn't fit."""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The state of the books after a commit. `head` and `digest` are that commit's; they are not part of its hash."""

    run: PeerId
    epoch: int
    round: int
    cursor: int
    pool: tuple[Range, ...]
    seats: tuple[Seat, ...]
    voters: tuple[PeerId, ...]  # the coordinator is the last of them
    since: Mapping[PeerId, int]  # round in which a peer first counted without leaving since
    standing: Mapping[PeerId, Standing]
    tokens: int
    credit: Mapping[PeerId, int]  # tokens that counted, by peer
    nominal_step: int
    n_committed: int
    norms: tuple[float, ...]  # s·‖aggregate‖ / (Σ lr)^0.8 of the last committed rounds, oldest first
    centre_norm: float  # s·‖aggregate‖ of the head, which centred rules start from; 0 after an empty round
    bandwidths: Mapping[PeerId, float]
    spec_revision: int  # in force in the round after the head
    next_revision: int = 0  # amended, and in force from round `next_from` on; 0: none
    next_from: int = 0
    paused: bool = False
    ends_after: int = 0  # the last round by order; 0: none
    end_reason: str = ""
    n_orders: int = 0  # number of the last order that was obeyed
    rollbacks: int = 0
    head: bytes = ZERO_HASH
    digest: bytes = ZERO_HASH

    @property
    def newest_revision(self) -> int:
        """The last revision that has been ordered, in force or not yet."""
        return max(self.spec_revision, self.next_revision)

    def is_banned(self, peer: PeerId) -> bool:
        return self.standing.get(peer) is Standing.BANNED

    def seat_of(self, peer: PeerId) -> Seat | None:
        return next((seat for seat in self.seats if seat.peer == peer), None)

    def hash(self) -> bytes:
        """The hash that the body names: of everything but head and digest, which depend on the body."""
        return hash_of(self.to_bytes())

    def at(self, head: bytes, digest: bytes) -> Ledger:
        return replace(self, head=head, digest=digest)

    def in_epoch(self, epoch: int, coordinator: PeerId) -> Ledger:
        """These books as the next round of a later epoch starts from them: with the coordinator as the only voter.

        The coordinator opens an epoch when a quorum is lost for good. What follows is judged by these books; folding a
        body of that epoch into them or into the ones before gives the same.
        """
        return replace(self, epoch=epoch, voters=(coordinator,))

    def to_bytes(self) -> bytes:
        """Canonical JSON of all but head and digest."""
        content: dict[str, Any] = asdict(self)
        del content["head"], content["digest"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @staticmethod
    def from_bytes(raw: bytes) -> Ledger:
        """Read `to_bytes` back. Raises LedgerError; the hash must be compared by the caller."""
        if len(raw) > LEDGER_BYTES_MAX:
            raise LedgerError(f"a ledger of {len(raw)} bytes exceeds the limit of {LEDGER_BYTES_MAX}")
        try:
            content = json.loads(raw)
            ledger = Ledger(
                run=_peer(content["run"]),
                epoch=_count(content["epoch"]),
                round=_count(content["round"]),
                cursor=_count(content["cursor"]),
                pool=_ranges(content["pool"]),
                seats=tuple(
                    Seat(_peer(s["peer"]), _ranges(s["ranges"]), _count(s["batch_scale"])) for s in content["seats"]
                ),
                voters=tuple(_peer(peer) for peer in content["voters"]),
                since={_peer(k): _count(v) for k, v in content["since"].items()},
                standing={_peer(k): Standing(v) for k, v in content["standing"].items()},
                tokens=_count(content["tokens"]),
                credit={_peer(k): _count(v) for k, v in content["credit"].items()},
                nominal_step=_count(content["nominal_step"]),
                n_committed=_count(content["n_committed"]),
                norms=tuple(_figure(norm) for norm in content["norms"]),
                centre_norm=_figure(content["centre_norm"]),
                bandwidths={_peer(k): _figure(v) for k, v in content["bandwidths"].items()},
                spec_revision=_count(content["spec_revision"]),
                next_revision=_count(content["next_revision"]),
                next_from=_count(content["next_from"]),
                paused=bool(content["paused"]),
                ends_after=_count(content["ends_after"]),
                end_reason=_reason(content["end_reason"]),
                n_orders=_count(content["n_orders"]),
                rollbacks=_count(content["rollbacks"]),
            )
            if not ledger.voters:
                raise ValueError("nobody votes")
            if len(ledger.voters) > limits.VOTERS:
                raise ValueError(f"{len(ledger.voters)} voters, at most {limits.VOTERS} can be")
            if len(ledger.norms) > NORMS_KEPT:
                raise ValueError(f"{len(ledger.norms)} norms are kept, at most {NORMS_KEPT} can be")
            return ledger
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise LedgerError(f"not a ledger: {error!r}") from error


def hash_of(raw: bytes) -> bytes:
    """The hash of a ledger's bytes as they are, before they are read."""
    return tagged_hash("ledger", raw)


def genesis(run: PeerId, coordinator: PeerId) -> Ledger:
    """The ledger of commit 0: nobody seated, the coordinator the only voter."""
    return Ledger(
        run=run, epoch=0, round=0, cursor=0, pool=(), seats=(), voters=(coordinator,), since={}, standing={}, tokens=0,
        credit={}, nominal_step=0, n_committed=0, norms=(), centre_norm=0.0, bandwidths={}, spec_revision=1,
    )  # fmt: skip


def fold(ledger: Ledger, body: Body, orders: Sequence[OpenedOrder] = (), target: Ledger | None = None) -> Ledger:
    """The ledger after a body. Raises LedgerError if the body doesn't extend it.

    The caller sets `head` and `digest` with `at`, and compares `hash()` with the body's `ledger_hash`.

    Args:
        orders: those that the body carries, opened.
        target: the books at the commit that a rollback among them goes back to, with head and digest.
    """
    if body.run != ledger.run:
        raise LedgerError("the body is another run's")
    if body.previous != ledger.head:
        raise LedgerError("the body doesn't extend this head")
    if body.round != ledger.round + 1 or body.epoch < ledger.epoch:
        raise LedgerError(
            f"round {body.round} of epoch {body.epoch} can't follow round {ledger.round} of {ledger.epoch}"
        )
    if not body.voters:
        raise LedgerError("the body leaves nobody to vote")
    if body.spec_revision != ledger.spec_revision:
        raise LedgerError(f"revision {body.spec_revision} of the RunSpec is not in force, {ledger.spec_revision} is")
    if tuple(each.envelope for each in orders) != body.orders:
        raise LedgerError("the body carries other orders than have been opened")
    switches = revision_after(ledger, orders) != ledger.spec_revision
    if (rollback := rollback_of(orders)) is not None:
        ledger = went_back(ledger, rollback, target)
    cursor = ledger.cursor
    for seat in body.seats:
        cursor = max([cursor, *(r.start + r.count for r in seat.ranges)])
    try:
        pool = _pool_after(ledger, body, cursor, goes_on=body.outcome is Outcome.EMPTY and not switches)
    except ValueError as error:
        raise LedgerError(str(error)) from error
    counted = [member for member in body.members if member.counted]
    committed = body.outcome is Outcome.COMMITTED
    credit = dict(ledger.credit)
    for member in counted:
        credit[member.peer] = credit.get(member.peer, 0) + member.tokens
    standing = dict(ledger.standing)
    standing.update({change.peer: change.standing for change in body.standing})
    seated = {seat.peer for seat in body.seats}
    since = {peer: at for peer, at in ledger.since.items() if peer in seated}
    for peer in sorted(seated):
        since.setdefault(peer, body.round)
    centre_norm = body.clip_factor * body.aggregate_norm if committed else 0.0
    if not math.isfinite(centre_norm):
        raise LedgerError(f"an aggregate of norm {body.aggregate_norm} times {body.clip_factor} is none")
    if banned := [peer for peer in (*seated, *body.voters) if standing.get(peer) is Standing.BANNED]:
        raise LedgerError(f"{banned[0]} is banned and has no seat and no vote")
    after = replace(
        ledger,
        epoch=body.epoch,
        round=body.round,
        cursor=cursor,
        pool=pool,
        seats=body.seats,
        voters=body.voters,
        since=since,
        standing=standing,
        tokens=ledger.tokens + sum(member.tokens for member in counted),
        credit=credit,
        nominal_step=ledger.nominal_step + (body.h if committed else 0),
        n_committed=ledger.n_committed + int(committed),
        norms=_norms_after(ledger, body, centre_norm),
        centre_norm=centre_norm,
        bandwidths={entry.peer: entry.kib_s for entry in body.reducers if entry.kib_s > 0} or ledger.bandwidths,
        head=ZERO_HASH,
        digest=ZERO_HASH,
    )
    return _obeyed(after, orders)


def rollback_of(orders: Iterable[OpenedOrder]) -> OpenedOrder | None:
    """The rollback among a body's orders, if there is one."""
    return next((each for each in orders if each.order.kind == Kind.ROLLBACK), None)


def went_back(ledger: Ledger, rollback: OpenedOrder, target: Ledger | None) -> Ledger:
    """The books that a rollback's body is folded into: what rounds have made of the run is as it was at the target.

    Round numbers go on, and so do orders, standings, who is here since when, and who votes. Whatever was leased after
    the target is free again, for its cursor and pool are the target's, and so is what was leased there: nobody goes on
    from progress since. Raises LedgerError without the right target.
    """
    if target is None or target.head != rollback.order.spec or target.run != ledger.run:
        raise LedgerError("the books to go back to are not those that the order names")
    if target.round != rollback.order.round or target.round > ledger.round:
        raise LedgerError(f"round {rollback.order.round} is not one to go back to after round {ledger.round}")
    return replace(
        target,
        epoch=ledger.epoch,
        round=ledger.round,
        pool=leases.normalise((*target.pool, *(r for seat in target.seats for r in seat.ranges))),
        seats=(),
        voters=ledger.voters,
        since=ledger.since,
        standing=ledger.standing,
        bandwidths=ledger.bandwidths,
        spec_revision=ledger.spec_revision,
        next_revision=ledger.next_revision,
        next_from=ledger.next_from,
        paused=ledger.paused,
        ends_after=ledger.ends_after,
        end_reason=ledger.end_reason,
        n_orders=ledger.n_orders,
        rollbacks=ledger.rollbacks,
        head=ledger.head,
    )


def revision_after(ledger: Ledger, orders: Sequence[OpenedOrder]) -> int:
    """The revision of the RunSpec in force after the next body, if it carries these orders."""
    return _obeyed(replace(ledger, round=ledger.round + 1), orders).spec_revision


def _obeyed(ledger: Ledger, orders: Sequence[OpenedOrder]) -> Ledger:
    """The books after a body, once its orders are obeyed."""
    for each in orders:
        order = each.order
        if order.number <= ledger.n_orders:
            raise LedgerError(f"order {order.number} is an old one: order {ledger.n_orders} has been obeyed")
        ledger = replace(ledger, n_orders=order.number)
        match Kind(order.kind):
            case Kind.PAUSE:
                ledger = replace(ledger, paused=True)
            case Kind.RESUME if not order.peer:
                ledger = replace(ledger, paused=False, ends_after=0, end_reason="")
            case Kind.END:
                ledger = replace(ledger, ends_after=max(order.round, ledger.round), end_reason=order.reason)
            case Kind.AMEND if each.spec is not None:
                begins = max(order.round, ledger.round + 1)
                ledger = replace(ledger, next_revision=each.spec.revision, next_from=begins)
            case Kind.ROLLBACK:
                ledger = replace(ledger, rollbacks=ledger.rollbacks + 1)
            case _:
                pass  # a peer's standing is in the body
    if ledger.next_revision and ledger.round + 1 >= ledger.next_from:
        ledger = replace(ledger, spec_revision=ledger.next_revision, next_revision=0, next_from=0)
    return ledger


def round_lr(members: Iterable[MemberEntry]) -> float:
    """Σ of a round's inner learning rates: the weighted lower median of what the members that counted say of theirs.

    A sum of 0 says that nobody knows. Who claims less than its steps took can move it no further than to another's sum
    while it holds less than half of the weight, and more than its steps allow is out before.
    """
    rows = sorted((member.sum_lr, Fraction(member.weight)) for member in members if member.counted)
    # Exactly, for a sum of floats is not the same in every version of Python.
    half = sum((weight for _, weight in rows), Fraction(0)) / 2
    cumulated = Fraction(0)
    for sum_lr, weight in rows:
        cumulated += weight
        if cumulated >= half:
            return sum_lr
    return 0.0


def _norms_after(ledger: Ledger, body: Body, norm: float) -> tuple[float, ...]:
    """With what a committed round's aggregate adds, unless nothing says what it is to be compared by."""
    if body.outcome is not Outcome.COMMITTED:
        return ledger.norms
    sum_lr = round_lr(body.members)
    if sum_lr == 0.0 and norm > 0.0:
        return ledger.norms
    return (*ledger.norms, normalised(norm, sum_lr))[-NORMS_KEPT:]


def _pool_after(ledger: Ledger, body: Body, cursor: int, *, goes_on: bool) -> tuple[Range, ...]:
    """Returned batches that nobody holds: old pool and returned ones and skipped new ones, less the new leases.

    Over an empty round the leases of who is seated again go on, and may grow, unless the RunSpec changes.
    """
    held = {seat.peer: seat.ranges for seat in ledger.seats} if goes_on else {}
    free = leases.normalise((*ledger.pool, *body.returned, Range(ledger.cursor, cursor - ledger.cursor)))
    leased: list[Range] = []
    for seat in body.seats:
        before = held.get(seat.peer, ())
        if not leases.begins_with(seat.ranges, before):
            raise ValueError(f"the lease of {seat.peer} does not go on over an empty round")
        leased += leases.rest(seat.ranges, leases.count(before))
    pool = leases.subtract(free, leases.normalise(leased))
    leases.normalise((*pool, *(r for seat in body.seats for r in seat.ranges)))  # none of them twice
    return pool


def _figure(content: Any) -> float:
    figure = float(content)
    if not (math.isfinite(figure) and figure >= 0):
        raise ValueError(f"{figure} is no figure, which is 0 or more")
    return figure


def _count(content: Any) -> int:
    """One that messages can carry, also when it has grown: what is read here is said to others."""
    count = int(content)
    bounds.Integer(most=limits.INTEGER // 2).check(count)
    return count


def _peer(content: Any) -> PeerId:
    bounds.Peer().check(content)
    return PeerId(content)


def _reason(content: Any) -> str:
    bounds.REASON.check(content)
    return str(content)


def _ranges(content: Any) -> tuple[Range, ...]:
    ranges = tuple(Range(_count(item["start"]), _count(item["count"])) for item in content)
    if any(r.start < 0 or r.count <= 0 for r in ranges):
        raise ValueError("a range must start at 0 or later and hold a batch")
    return ranges
