"""A voter: which numbers it heeds, what it has signed, and whether a proposal is what it must be.

Single-decree Paxos a round. A voter promises a number to one leader, refuses lower ones, and hands over the proposal
that it signed with the number of that vote; votes are counted per number. Its record must be on disk before a promise
or a vote leaves the process; whoever lost the record abstains until the next commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import TypeVar

from coordinator.rounds import policy, work
from coordinator.rounds.ledger import Ledger, LedgerError
from coordinator.rounds.orders import NONE, Orders, order_faults
from coordinator.rounds.proposing import (
    Evidence,
    build_body,
    evidence_faults,
    result_hashes,
)
from protos.messages import (
    Body,
    Leave,
    PeerId,
    Plan,
    Prepare,
    Promise,
    Propose,
    Refusal,
    Vote,
)
from protos.runspec import RunSpec

ATTEMPTS_MAX = 2**31 - 1
ABSTAINS = "abstains"
"""What the reason begins with by which a voter says that it signs nothing in this round, whatever it is asked."""
NOBODY = PeerId("")

R = TypeVar("R", Promise, Leave)


class Voter:
    """One voter's numbers. Mutated only by `prepared`, `voted`, `leave` and `moved`; what they return is to be kept.

    Args:
        me: this voter.
        record: its last promise or vote, from disk.
        lost: the record of the current round may be lost: abstain until the next commit.
        signed: the last round of each epoch in which it promised or voted, from disk: a branch of a lower epoch may be
            followed again, and what was signed on the other one binds nobody there.
    """

    def __init__(
        self,
        me: PeerId,
        record: Promise | Leave | None,
        *,
        lost: bool = False,
        signed: Mapping[int, int] | None = None,
    ) -> None:
        self.me = me
        self._record = record
        self._lost = lost
        self._signed = dict(signed or {})
        if record is not None:
            self._note(record)

    @property
    def record(self) -> Promise | Leave | None:
        return self._record

    @property
    def signed(self) -> Mapping[int, int]:
        """The last round of each epoch in which it promised or voted."""
        return self._signed

    @property
    def abstains(self) -> bool:
        """Whether it has lost its record of the current round."""
        return self._lost

    def promised(self, ledger: Ledger) -> int:
        """The highest number that it has promised in the round after the ledger, -1: none."""
        record = self._current(ledger)
        return record.attempt if record is not None else -1

    def has_left(self, ledger: Ledger) -> bool:
        """Whether this voter signed a LEAVE of the round after the ledger."""
        return any((leave.epoch, leave.round) == (ledger.epoch, ledger.round + 1) for leave in self._leaves())

    def last_words(self, ledger: Ledger) -> tuple[Leave, ...]:
        """The leaves of the round after the ledger and of the one after it, if it has left that round."""
        return self._leaves(ledger.round + 1) if self.has_left(ledger) else ()

    def _leaves(self, from_round: int = 0) -> tuple[Leave, ...]:
        """Those that it signed last. The second one says nothing that its round and epoch don't, so it is no record."""
        record = self._record
        if not isinstance(record, Leave):
            return ()
        signed = [record]
        if self._signed.get(record.epoch) == record.round + 1:
            signed.append(_nothing_promised(record.epoch, record.round + 1))
        return tuple(leave for leave in signed if leave.round >= from_round)

    def moved(self) -> None:
        """A commit has come: what was lost concerned the round before."""
        self._lost = False

    def prepared(self, prepare: Prepare, ledger: Ledger) -> Promise | Refusal:
        """Promise this number to its leader, or say why not."""
        if refusal := self._refused(prepare, ledger):
            return refusal
        record = self._current(ledger)
        voted_attempt, proposal = (record.voted_attempt, record.proposal) if record else (-1, None)
        return self._keep(
            Promise(prepare.epoch, prepare.round, prepare.attempt, prepare.leader, ledger.head, voted_attempt, proposal)
        )

    def would_vote(self, propose: Propose, ledger: Ledger) -> Refusal | None:
        """Why a proposal can't have this voter's vote whatever it holds."""
        if refusal := self._refused(propose, ledger):
            return refusal
        record = self._current(ledger)
        if record is not None and record.voted_attempt == propose.attempt and record.proposal != propose.proposal:
            return _refusal(propose, propose.attempt, "signed another proposal of this number")
        return None

    def bound(self, plan: Plan, ledger: Ledger) -> Refusal | None:
        """The promise that would keep this voter from voting on what comes of a plan, if there is one."""
        record = self._current(ledger)
        if record is None or policy.heeds(record, plan.attempt, plan.leader):
            return None
        return _refusal(plan, record.attempt, f"promised number {record.attempt} to {record.leader}")

    def voted(
        self, propose: Propose, body_hash: bytes, digest: bytes, ledger: Ledger
    ) -> tuple[Vote, Promise] | Refusal:
        """The vote, and the record to keep before it is sent; or why not."""
        if refusal := self.would_vote(propose, ledger):
            return refusal
        number = (propose.epoch, propose.round, propose.attempt, propose.leader)
        record = self._keep(Promise(*number, ledger.head, propose.attempt, propose.proposal))
        return Vote(*number, body_hash, digest), record

    def leave(self, ledger: Ledger) -> Leave | None:
        """The last promise of this round, above every number; None if this voter can't say what it has promised."""
        if self._lost and self.me in ledger.voters:
            return None
        if said := self.last_words(ledger):
            return said[0]
        if self._forgot(ledger):
            return None
        record = self._current(ledger)
        here = (ledger.epoch, ledger.round + 1)
        if record is None:
            return self._keep(Leave(*here, -1, NOBODY, ledger.head, -1, None))
        promised = (record.attempt, record.leader)
        return self._keep(Leave(*here, *promised, ledger.head, record.voted_attempt, record.proposal))

    def leave_next(self, ledger: Ledger) -> Leave:
        """The last promise of the round after the one that `leave` was for, in which nothing can be promised yet.

        What is proposed in this round may name its signer a voter of that one. It is to be persisted before the first
        one is, which stays the record.
        """
        leave = _nothing_promised(ledger.epoch, ledger.round + 2)
        self._note(leave)
        return leave

    def _refused(self, asked: Prepare | Propose, ledger: Ledger) -> Refusal | None:
        if reason := self._unheeded(asked, ledger):
            return _refusal(asked, asked.attempt, reason)
        record = self._current(ledger)
        if record is not None and not policy.heeds(record, asked.attempt, asked.leader):
            return _refusal(asked, record.attempt, f"promised number {record.attempt} to {record.leader}")
        return None

    def _unheeded(self, asked: Prepare | Propose, ledger: Ledger) -> str:
        here = (asked.epoch, asked.round)
        if here != (ledger.epoch, ledger.round + 1):
            return f"my head is round {ledger.round} of epoch {ledger.epoch}"
        if self.me not in ledger.voters:
            return "not a voter of this round"
        if self._lost:
            return f"{ABSTAINS} until the next commit: its record of this round is lost"
        if self.has_left(ledger):
            return "has left this round"
        if self._forgot(ledger):
            signed = self._signed[ledger.epoch]
            return f"{ABSTAINS}: it has signed in round {signed} already, and its state is older than its record"
        if not 0 <= asked.attempt <= ATTEMPTS_MAX:
            return f"{asked.attempt} is no attempt's number"
        if asked.attempt == 0 and asked.leader != ledger.voters[-1]:
            return "number 0 is the coordinator's, who needs no promises for it"
        return ""

    def _forgot(self, ledger: Ledger) -> bool:
        """Whether it may have signed in the round after the ledger and has no record of it any more."""
        signed = self._signed.get(ledger.epoch, -1)
        return signed > ledger.round + 1 or (signed == ledger.round + 1 and self._current(ledger) is None)

    def _keep(self, record: R) -> R:
        self._record = record
        self._note(record)
        return record

    def _note(self, record: Promise | Leave) -> None:
        self._signed[record.epoch] = max(record.round, self._signed.get(record.epoch, -1))

    def _current(self, ledger: Ledger) -> Promise | None:
        record = self._record
        if isinstance(record, Promise) and (record.epoch, record.round) == (ledger.epoch, ledger.round + 1):
            return record
        return None


def _nothing_promised(epoch: int, round_: int) -> Leave:
    """Of a round whose head is not known yet."""
    return Leave(epoch, round_, -1, NOBODY, b"", -1, None)


def _refusal(asked: Prepare | Propose | Plan, attempt: int, reason: str) -> Refusal:
    """A refusal names the number that stands in the way, so that the leader can pass it."""
    return Refusal(asked.epoch, asked.round, attempt, reason)


def body_faults(
    body: Body,
    evidence: Evidence | None,
    hashes: Collection[bytes],
    ledger: Ledger,
    spec: RunSpec,
    coordinator: PeerId,
    orders: Orders = NONE,
    *,
    attempt: int = ATTEMPTS_MAX,
) -> list[str]:
    """What is wrong with a proposed body after `ledger`: nothing, if it is what its evidence makes it.

    The body is built again from the evidence and the leader's choices, and compared field by field.

    Args:
        spec: the revision of the RunSpec that is in force.
        orders: those that the body carries, opened, with what they need.
        attempt: the number that it is proposed under, now or again.
    """
    if (body.run, body.epoch, body.round, body.previous) != (ledger.run, ledger.epoch, ledger.round + 1, ledger.head):
        return ["the body doesn't extend my head"]
    if not 0 <= body.attempt <= attempt or (body.attempt == 0 and body.leader != coordinator):
        return ["the body's first attempt is none that its leader can have made before this one"]
    if orders.envelopes != body.orders:
        return ["the body carries other orders than have been opened"]
    if faults := order_faults(orders.given, ledger, orders.specs):
        return faults
    if evidence is not None and ledger.paused:
        return ["the operator has paused the run"]
    if evidence is not None and orders.rollback is not None:
        return ["a rollback is a round of its own"]
    if evidence is not None and (faults := evidence_faults(evidence, ledger, spec)):
        return faults
    if evidence is not None and (body.attempt, body.leader) != (evidence.plan.attempt, evidence.plan.leader):
        return ["the body's first attempt is not its plan's"]
    if evidence is not None and tuple(hashes) != result_hashes(evidence, spec):
        return ["the result hashes are not those that the reducers signed"]
    if evidence is None and hashes:
        return ["an empty round has no results"]
    if evidence is None and not body.reason:
        return ["an empty round without a reason"]
    signed = tuple(evidence.commitments) if evidence else ledger.voters
    seated = [seat.peer for seat in body.seats]
    left = [peer for peer in signed if peer not in body.voters and peer not in seated]
    included = evidence.included() if evidence else {}
    reason = policy.refused(spec, included, evidence.deal.excluded) if evidence else body.reason
    try:
        expected = build_body(
            ledger,
            spec,
            coordinator,
            attempt=body.attempt,
            leader=body.leader,
            evidence=evidence,
            reason=reason,
            seated={seat.peer: work.of(seat) for seat in body.seats},
            left=left,
            orders=orders,
        )
    except (LedgerError, ValueError) as error:
        return [f"the body's leases don't fit: {error}"]
    return [
        f"{field.name} is not what the round's evidence makes it"
        for field in fields(Body)
        if getattr(body, field.name) != getattr(expected, field.name)
    ]


def certificate_faults(
    signed: Collection[tuple[PeerId, Vote | Leave]],
    body_hash: bytes,
    digest: bytes,
    attempt: int,
    ledger: Ledger,
    coordinator: PeerId,
) -> str:
    """Why these votes and leaves (signatures verified) don't make a commit after `ledger`, or an empty string.

    A signed LEAVE of this round takes its weight out of the quorum of attempts that its sender was free to heed, so it
    stands in the certificate beside the votes. All votes that count are of one leader's attempt.
    """
    here = (ledger.epoch, ledger.round + 1)
    votes = [
        (peer, item.leader)
        for peer, item in signed
        if isinstance(item, Vote)
        and (item.epoch, item.round) == here
        and (item.body_hash, item.digest, item.attempt) == (body_hash, digest, attempt)
    ]
    leaves = [(peer, item) for peer, item in signed if isinstance(item, Leave) and (item.epoch, item.round) == here]
    have, needed = 0, policy.weight_of(ledger.voters, coordinator)
    for leader in dict.fromkeys(leader for _, leader in votes):
        signers = {peer for peer, of in votes if of == leader}
        left = {peer for peer, leave in leaves if policy.heeds(leave, attempt, leader)} - signers
        if policy.is_quorum(signers, ledger.voters, coordinator, left):
            return ""
        present = [peer for peer in ledger.voters if peer not in left]
        have = policy.weight_of([peer for peer in present if peer in signers], coordinator)
        needed = policy.weight_of(present, coordinator)
    return f"votes weigh {have} of {needed}: no quorum"
