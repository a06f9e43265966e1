"""What a leader says, opened for a member: as its driver does it, against the registry instead of signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from node.session import events as ev
from protos.hashes import body_hash, plan_hash
from protos.messages import (
    AttemptFailed,
    Body,
    Commit,
    Deal,
    Goodbye,
    Head,
    Inquiry,
    Leave,
    PeerId,
    Plan,
    Prepare,
    Propose,
    Records,
    Redeal,
    Signed,
    Vote,
    Welcome,
)
from tests.fakes.evidence import commitments_of, evidence_in
from tests.sim.chain import Violated

if TYPE_CHECKING:
    from tests.sim.world import World


def opened(world: World, message: object, leader: PeerId) -> ev.Event | None:
    """The event that a member's driver makes of what a leader says; None for what is no matter of the session."""
    registry = world.registry
    match message:
        case Welcome(_, commit):
            body = registry.decode(Body, commit.body)
            ledger = world.ledger_of(commit, message.ledger)
            signed_head = None
            if message.signed_head:
                _, head = registry.opened(Head, message.signed_head)
                signed_head = ev.HeadSigned(head, message.signed_head)
            return ev.LineUp(message, body, ledger, _signed(world, commit), signed_head, world.chain.orders_of(body))
        case Commit():
            known = world.opened_commits.get((id(message), leader))
            if known is None:
                body = registry.decode(Body, message.body)
                hash_ = world.chain.commit(message, body)
                orders = world.chain.orders_of(body)
                heard = ev.CommitHeard(message, body, hash_, _signed(world, message), leader, orders)
                known = world.opened_commits[id(message), leader] = (message, heard)
            return known[1]
        case AttemptFailed(epoch, round_, attempt, reason):
            return ev.AttemptOver(epoch, round_, attempt, reason, leader)
        case Goodbye():
            return ev.SaidGoodbye(message, leader)
        case Inquiry():
            return ev.Inquired(message)
        case Records():
            return None
        case Signed(envelope):
            signer, signed = registry.open(envelope)
            if signer != leader:
                raise Violated(f"{leader} passes on what {signer} signed")
            event = world.opened.get(envelope)
            if event is None:
                event = world.opened[envelope] = _signed_event(world, signed, envelope, leader)
            return event
        case _:
            raise Violated(f"{leader} says {message}")


def _signed_event(world: World, message: object, envelope: bytes, leader: PeerId) -> ev.Event:
    match message:
        case Plan():
            return ev.Planned(message, plan_hash(world.registry.encode(message)), envelope)
        case Deal():
            return ev.Dealt(message, envelope, commitments_of(world.registry, message))
        case Redeal():
            return ev.Redealt(message, leader)
        case Prepare():
            return ev.Prepared(message)
        case Head():
            return ev.HeadSigned(message, envelope)
        case Propose():
            return _proposed(world, message)
        case _:
            raise Violated(f"a leader signs {message}")


def _proposed(world: World, propose: Propose) -> ev.Proposed:
    registry, proposal = world.registry, propose.proposal
    body = registry.decode(Body, proposal.body)
    hash_, orders = body_hash(proposal.body), world.chain.orders_of(body)
    evidence = evidence_in(registry, proposal, body)
    if evidence is None:
        return ev.Proposed(propose, body, hash_, None, b"", None, {}, {}, orders=orders)
    plan, deal, redeal = evidence.plan, evidence.deal, evidence.redeal
    shown = (evidence.commitments, evidence.results)
    return ev.Proposed(propose, body, hash_, plan, evidence.plan_hash, deal, *shown, redeal, orders)


def _signed(world: World, commit: Commit) -> tuple[tuple[PeerId, Vote | Leave], ...]:
    opened = [world.registry.open(envelope) for envelope in commit.votes]
    return tuple((signer, message) for signer, message in opened if isinstance(message, Vote | Leave))
