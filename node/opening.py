"""What the leader says, opened: every envelope is verified before the deciding code sees its message as an event."""

from __future__ import annotations

from coordinator.leading.evidence import open_commitments, open_evidence
from coordinator.leading.orders import open_orders
from coordinator.rounds.ledger import Ledger, LedgerError, hash_of
from node.session import events as ev
from protos import hashes, wire
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Deal,
    Genesis,
    Goodbye,
    Head,
    Inquiry,
    LeaderMessage,
    Leave,
    PeerId,
    Plan,
    Prepare,
    Propose,
    Redeal,
    Signed,
    Vote,
    Welcome,
)
from protos.orders import OpenedOrder
from protos.sealer import open_signed
from protos.signing import Purpose, SignatureError, purpose_of, unseal
from protos.wire import WireError


class BadWord(ValueError):
    """The leader said something that can't be: says what."""


class Opener:
    """Opens what one leader says in one run."""

    def __init__(self, run: PeerId, coordinator: PeerId) -> None:
        self._run, self._coordinator = run, coordinator

    def event(self, message: LeaderMessage | Signed, leader: PeerId) -> ev.Event:
        """The event of a message of the leader's line. Raises BadWord."""
        try:
            match message:
                case Signed(envelope):
                    return self._signed(envelope, leader)
                case Commit():
                    body = wire.decode_terse(Body, message.body)
                    hash_ = hashes.commit_hash(message.body, message.digest)
                    return ev.CommitHeard(message, body, hash_, self.votes(message), leader, self.orders(body))
                case AttemptFailed(epoch, round_, attempt, reason):
                    return ev.AttemptOver(epoch, round_, attempt, reason, leader)
                case Inquiry():
                    return ev.Inquired(message)
                case Goodbye():
                    return ev.SaidGoodbye(message, leader)
                case _:
                    raise BadWord(f"a {type(message).__name__} where none is due")
        except (SignatureError, WireError, LedgerError) as error:
            raise BadWord(f"{type(message).__name__}: {error}") from error

    def welcome(self, welcome: Welcome) -> ev.LineUp:
        """Raises BadWord; the ledger has the hash that the head's body names."""
        try:
            signed = self.head_signed(welcome.signed_head) if welcome.signed_head else None
            body, ledger, votes = self.head(welcome.commit, welcome.ledger)
            return ev.LineUp(welcome, body, ledger, votes, signed, self.orders(body))
        except (SignatureError, WireError, LedgerError) as error:
            raise BadWord(f"Welcome: {error}") from error

    def head(self, commit: Commit, ledger: bytes) -> tuple[Body, Ledger, tuple[tuple[PeerId, Vote | Leave], ...]]:
        """A commit with the folded ledger after it, both opened. Raises LedgerError, WireError or SignatureError."""
        body = wire.decode_terse(Body, commit.body)
        if body.run != self._run:
            raise LedgerError(f"the commit is of run {body.run}, not of {self._run}")
        if hash_of(ledger) != body.ledger_hash:  # before it is read: read, it takes many times its bytes
            raise LedgerError("the ledger is not the one that the commit's body names")
        folded = Ledger.from_bytes(ledger)
        if (folded.run, folded.epoch, folded.round) != (body.run, body.epoch, body.round):
            raise LedgerError("the ledger is of another round than the commit")
        return body, folded.at(hashes.commit_hash(commit.body, commit.digest), commit.digest), self.votes(commit)

    def orders(self, body: Body) -> tuple[OpenedOrder, ...]:
        """The orders that a body carries, each by somebody who may give it. Raises SignatureError."""
        return open_orders(body, self._run, self._coordinator)

    def votes(self, commit: Commit) -> tuple[tuple[PeerId, Vote | Leave], ...]:
        """Votes and leaves of a commit whose signatures hold; for commit 0, which the run key signs, none."""
        signed: list[tuple[PeerId, Vote | Leave]] = []
        for envelope in commit.votes:
            try:
                opened = open_signed(envelope, self._run)
            except SignatureError:
                self._genesis(commit, envelope)
                continue
            if isinstance(opened.message, Vote | Leave):
                signed.append((opened.signer, opened.message))
        return tuple(signed)

    def _genesis(self, commit: Commit, envelope: bytes) -> None:
        opened = unseal(envelope, purpose=Purpose.GENESIS, run=self._run, signer=self._run)
        genesis = wire.decode(Genesis, opened.body)
        if (genesis.body_hash, genesis.digest) != (hashes.body_hash(commit.body), commit.digest):
            raise SignatureError("the run key signed another first commit")

    def head_signed(self, envelope: bytes) -> ev.HeadSigned:
        """The coordinator's word on a head, whoever passes it on."""
        message = open_signed(envelope, self._run, signer=self._coordinator, kind=Head).message
        if not isinstance(message, Head):
            raise SignatureError("no head")
        return ev.HeadSigned(message, envelope)

    def _signed(self, envelope: bytes, leader: PeerId) -> ev.Event:
        if purpose_of(envelope) is Purpose.HEAD:
            return self.head_signed(envelope)
        opened = open_signed(envelope, self._run, signer=leader)
        match opened.message:
            case Plan() | Prepare() | Propose() as message if message.leader != leader:
                raise SignatureError(f"a {type(message).__name__} in the name of {message.leader}")
            case Plan() as message:
                return ev.Planned(message, hashes.plan_hash(opened.body), envelope)
            case Deal() as message:
                return ev.Dealt(message, envelope, open_commitments(message, self._run))
            case Redeal() as message:
                return ev.Redealt(message, leader)
            case Prepare() as message:
                return ev.Prepared(message)
            case Propose() as message:
                return self._proposed(message)
            case other:
                raise SignatureError(f"the leader has no say in a {type(other).__name__}")

    def _proposed(self, propose: Propose) -> ev.Proposed:
        proposal = propose.proposal
        body = wire.decode_terse(Body, proposal.body)
        hash_ = hashes.body_hash(proposal.body)
        orders, evidence = self.orders(body), open_evidence(proposal, body.leader, self._run)
        if evidence is None:
            return ev.Proposed(propose, body, hash_, None, b"", None, {}, {}, orders=orders)
        plan, deal, redeal = evidence.plan, evidence.deal, evidence.redeal
        shown = (evidence.commitments, evidence.results)
        return ev.Proposed(propose, body, hash_, plan, evidence.plan_hash, deal, *shown, redeal, orders)
